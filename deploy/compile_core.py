"""Compile the scheduling core with mypyc while a wheel is built: the same decisions in half the time.

    python deploy/compile_core.py FOLDER     # from the repository's root, into FOLDER/lib; both are relative

Python stays the source, and what an editable install runs: a compiled module beside its ``.py`` would win, whatever is
edited afterwards. It takes about three minutes of one core, and what comes of it fits one version of Python.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SOURCES = Path("libs/pdmesh")

PACKAGES = ("core", "instance", "policy")

#: What travels, is logged or configured stays Python: mypyc forgets the keywords of a msgspec Struct (frozen,
#: omit_defaults) and most of a dataclass's annotations (`tuple[ChunkDone, ...]` becomes `tuple`), by which msgspec
#: reads them. Of one with plain numbers alone it still leaves defaults 0 and `__post_init__` uncalled.
READ_BY_MSGSPEC = (
    "core/commands.py",
    "core/config.py",
    "core/events.py",
    "core/operator_events.py",
    "policy/config.py",
    "policy/latency.py",
    "policy/latency_profile.py",
)

#: Nothing here is done often, and what is desired is kept and sent as it is.
SELDOM_DONE = ("core/operators",)

#: The library of this name has the code of all; each module is a stub that finds it.
GROUP = "pdmesh.compiled"


def sources() -> list[Path]:
    """Return the modules to compile, relative to the repository's root."""
    left_out = {SOURCES / name for name in (*READ_BY_MSGSPEC, *SELDOM_DONE)}
    paths = [path for package in PACKAGES for path in sorted((SOURCES / package).rglob("*.py"))]
    return [path for path in paths if path.stem != "__init__" and not left_out & {path, *path.parents}]


def main(folder: Path) -> None:
    """Compile with what is installed beside this interpreter; exits with another code than 0 if that fails."""
    from mypyc.build import mypycify

    setup = import_module("setuptools").setup  # it has no types

    extensions = mypycify(
        ["--strict", *map(str, sources())],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        target_dir=str(folder / "c"),
        group_name=GROUP,
    )
    for extension in extensions:
        extension.include_dirs.append(str(folder / "c" / GROUP.rpartition(".")[0]))
    script = ["-q", "build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "o")]
    setup(name="pdmesh", packages=[], ext_modules=extensions, script_args=script)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
