"""What is quoted of the logs of a mesh when a test fails."""

import os
from pathlib import Path

from pdmesh_testing.mesh_logs import LINE_LENGTH, NUM_LINES, warnings_since


def write_log(folder: Path, name: str, lines: list[str], written_s: float) -> None:
    log = folder / "mesh0" / "state" / "pdmesh" / "test" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(lines) + "\n")
    os.utime(log, (written_s, written_s))


def test_what_services_warned_of_since_a_test_began_is_quoted(tmp_path: Path) -> None:
    write_log(tmp_path, "gateway", ['{"event": "lost", "level": "warning"}'], 5.0)
    write_log(tmp_path, "decode-0", ['{"event": "serving", "level": "info"}', "", "Fatal Python error"], 10.0)
    write_log(tmp_path, "scheduler", [f'{{"number": {number}, "level": "error"}}' for number in range(99)], 11.0)
    write_log(tmp_path, "prefill-0", ["x" * 1000], 12.0)
    quoted = list(warnings_since(tmp_path, 10.0))
    assert quoted[0] == "test/decode-0: Fatal Python error"
    assert quoted[1] == f"test/prefill-0: {'x' * LINE_LENGTH}"
    assert quoted[2:] == [
        f'test/scheduler: {{"number": {number}, "level": "error"}}' for number in range(99 - NUM_LINES, 99)
    ]
