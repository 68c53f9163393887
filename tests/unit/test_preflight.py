"""What `pdmesh up` refuses before it starts a process: each mistake is one sentence, in a process without torch."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pdmesh.engine.devices import check_device
from pdmesh.errors import ConfigError
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.command import pdmesh_here
from pdmesh_testing.disks import full_beyond
from pdmesh_testing.gguf_files import write_gguf

#: Writes what is wrong below a folder and returns what is typed behind `pdmesh up`.
Mistake = Callable[[Path], list[str]]


def typed(*arguments: str) -> Mistake:
    return lambda _folder: list(arguments)


def with_model(*arguments: str) -> Mistake:
    return lambda folder: [str(write_checkpoint(folder / "model")), *arguments]


def with_file(name: str, content: str, *arguments: str) -> Mistake:
    def write(folder: Path) -> list[str]:
        (folder / name).write_text(content)
        return list(arguments)

    return write


def with_config(*arguments: str, **fields: object) -> Mistake:
    def write(folder: Path) -> list[str]:
        config = write_checkpoint(folder / "model") / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return [str(folder / "model"), *arguments]

    return write


def cut(name: str, num_bytes: int) -> Mistake:
    def write(folder: Path) -> list[str]:
        file = write_checkpoint(folder / "model") / name
        file.write_bytes(file.read_bytes()[:num_bytes])
        return [str(folder / "model")]

    return write


def gguf(damage: Callable[[bytes], bytes]) -> Mistake:
    def write(folder: Path) -> list[str]:
        file = folder / "model.gguf"
        write_gguf(write_checkpoint(folder / "model"), file, "Q8_0")
        file.write_bytes(damage(file.read_bytes()))
        return [str(file)]

    return write


def of_an_unserved_type(content: bytes) -> bytes:
    """The same file, with the type of the embedding changed to a number that no type has."""
    name = b"token_embd.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind its number of dimensions and two of these
    return content[:place] + struct.pack("<I", 99) + content[place + 4 :]


_QWEN = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention"] * 2}
MISTAKES: Mapping[str, tuple[Mistake, str]] = {
    "device": (typed("--device", "gpu"), "device is 'gpu': use auto, cpu or cuda"),
    "dtype": (typed("--dtype", "int8"), "--dtype is 'int8': must be one of auto, float32, bfloat16, float16"),
    "length": (
        with_model("--max-model-len", "9000"),
        "max_model_len is 9000, but the model has a context of 8192 tokens",
    ),
    "bundle": (typed("--bundle", "pdmsh"), "no policy bundle is called 'pdmsh': did you mean pdmesh? There are edf, "),
    "quantisation": (
        with_config(quantization_config={"quant_method": "quip"}),
        "{folder}/model/config.json: the checkpoint is quantised by 'quip', which is not supported; use one of ",
    ),
    "architecture": (
        with_config(architectures=["MambaForCausalLM"]),
        "{folder}/model/config.json: the architecture is 'MambaForCausalLM', which is not supported; use one of ",
    ),
    "gguf type": (
        gguf(of_an_unserved_type),
        "{folder}/model.gguf: tensor 'token_embd.weight' is of GGML's type number 99, which is not supported; use ",
    ),
    "gguf cut": (gguf(lambda content: content[:-100]), "{folder}/model.gguf is a damaged GGUF file ("),
    "no gguf": (gguf(lambda content: b"PK" + content), "{folder}/model.gguf is not a GGUF file"),
    "weights cut": (
        cut("model.safetensors", 9000),
        "{folder}/model/model.safetensors is not a readable safetensors file: ",
    ),
    "tokenizer cut": (cut("tokenizer.json", 900), "{folder}/model/tokenizer.json cannot be read: "),
    "config cut": (cut("config.json", 90), "{folder}/model/config.json cannot be read: "),
    "memory": (
        with_model("--kv-cache-bytes", str(1 << 50)),
        "the model's weights take 0.0 GiB in float32 and KV 1048576.0 GiB, in each of 2 instances, and ",
    ),
    "no room for a block": (
        with_model("--kv-cache-bytes", "100"),
        "worker.kv_cache_bytes is 100, but one block of 16 tokens takes ",
    ),
    "states": (with_config("--set=worker.block_size=16", **_QWEN), "worker.block_size is 16, but a Qwen3_5ForCausalLM"),
    "ranks": (with_model("-tp", "3"), "tensor_parallel_size is 3, but the model has 4 attention heads and 2 "),
    "ranges": (
        typed("--set", "worker.max_kv_tokens_per_instance=63"),
        "worker.max_kv_tokens_per_instance is 63, not a multiple of worker.block_size, 16",
    ),
    "adapter": (typed("--lora", "nowhere"), "nowhere holds no adapter_config.json: give the directory of a LoRA "),
    "key file": (
        typed("--set", "security.api_keys_file=nowhere.toml"),
        "cannot read security.api_keys_file nowhere.toml: No such file or directory",
    ),
    "operators": (
        with_file("operators.toml", "[operators.bob]", "--set", "security.operators_file=operators.toml"),
        "[operators.bob] in security.operators_file operators.toml has no hash: ",
    ),
    "certificate": (
        typed("--set", "security.tls_cert=mesh.pem", "--set", "security.tls_key=mesh.key"),
        "cannot read security.tls_cert mesh.pem: No such file or directory",
    ),
    "open to strangers": (
        typed("--host", "0.0.0.0"),
        "the gateway would listen on 0.0.0.0, outside this machine without TLS (security.tls_cert, ",
    ),
    "no such file": (typed("./nosuch.gguf"), "model './nosuch.gguf': there is no such file"),
    "no such directory": (typed("models/llama/8b"), "model 'models/llama/8b': there is no such file or directory"),
    "name of another tool": (
        typed("llama3:8b"),
        "model 'llama3:8b' is another tool's name for a model: give a Hugging Face hub id such as "
        "'Qwen/Qwen3-0.6B', a directory, a .gguf file, or smollm2 or gemma3-270m",
    ),
}


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PDMESH_GATEWAY_PORT": "0",
    }


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_starts(
    name: str, environ: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mistake, told = MISTAKES[name]
    done = pdmesh_here("up", *mistake(tmp_path), environ=environ)
    assert done.returncode == 2
    assert done.stdout == "", "nothing is announced"
    assert done.stderr.startswith(f"pdmesh: {told.format(folder=tmp_path)}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("state/pdmesh/default/*.log"))


def test_the_checks_need_no_torch(environ: Mapping[str, str], tmp_path: Path) -> None:
    """Torch alone takes longer to import than a refusal may."""
    program = (
        "import sys; from pdmesh.cli import main; sys.argv = ['pdmesh', 'up', *sys.argv[1:]]; code = main()\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    arguments = [str(write_checkpoint(tmp_path / "model")), "--max-model-len", "9000"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "pdmesh: max_model_len is 9000, but the model has a context of 8192 tokens\n",
    )


def test_a_port_that_is_taken_is_told_by_its_flag(environ: Mapping[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = pdmesh_here("up", "--port", port, environ=environ)
    assert done.returncode == 2
    assert done.stderr.endswith("or set --port (gateway.port) to another\n"), done.stderr


def test_a_device_that_cannot_be_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("auto", "cpu"):
        check_device(name, tmp_path)
    with pytest.raises(ConfigError, match="device is 'cuda:1', but this machine has no NVIDIA device: set it to cpu"):
        check_device("cuda:1", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.13.0")
    check_device("cuda:1", tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is a build without CUDA: install another build"):
        check_device("cuda", tmp_path)


def test_a_detached_mesh_says_why_it_fails_where_no_log_can_be_written(environ: Mapping[str, str]) -> None:
    with full_beyond(0):  # the detached process has the same limit
        done = pdmesh_here("up", "--detach", "--device", "gpu", environ=environ)
    assert done.returncode != 0
    assert done.stderr == "pdmesh: device is 'gpu': use auto, cpu or cuda\n"
