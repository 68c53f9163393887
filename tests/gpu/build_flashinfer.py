"""Compile the FlashInfer modules that the engine and its tests use, and copy them to a folder: `recipe.sh build`.

Each becomes ``FOLDER/NAME/NAME.so``, which FlashInfer loads as it is from ``flashinfer/data/aot``. Decodes use the same
modules as chunks: they are computed by the tensor cores' kernels.
"""

# FlashInfer is only where there is a device.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch
from flashinfer.jit.attention import gen_batch_prefill_module

#: Of the tests' models and of Llama 3.
HEAD_DIM = 128


def main() -> None:
    folder = Path(sys.argv[1])
    for backend in ("fa2", "fa3"):
        dtypes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
        spec = gen_batch_prefill_module(backend, *dtypes, HEAD_DIM, HEAD_DIM, 0, False, False, False)
        if spec.is_aot:
            sys.stdout.write(f"{spec.name}: there\n")
            continue
        started_s = time.perf_counter()
        spec.build(False)
        target = folder / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, target)
        size = target.stat().st_size / 2**20
        sys.stdout.write(f"{spec.name}: {time.perf_counter() - started_s:.0f} s, {size:.1f} MiB\n")


if __name__ == "__main__":
    main()
