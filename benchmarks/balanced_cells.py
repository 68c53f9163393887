"""Two cells of two instances behind HAProxy, under load: one is stopped in good order, one is lost, and comes back.

    python benchmarks/balanced_cells.py [--streams N]

Cells are meshes of real processes (`pdmesh up`, stand-in engines with steps of 20 ms) that know nothing of each other.
HAProxy runs with ``deploy/haproxy/haproxy.cfg`` and these addresses; it has to be on the path. Clients send a request
once and never again. One line for each event: the streams that ended from its beginning until those that ran at its
end had ended, how many were lost or differ from an undisturbed one, and how many of those lost had not begun: these
the balancer should have sent to the other cell. A cell that is lost takes along the streams that it had begun alone.

Exit code 1 if any differs, any is lost by a cell that is stopped, or any is lost that had not begun.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from report import heading, unavailable

from pdmesh.cli.processes import ending_with_us
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.load import StreamLoad, requests_of, running_load
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.standby import free_port

CONFIG = Path(__file__).parents[1] / "deploy/haproxy/haproxy.cfg"
NAMES = ("a", "b")
SETTINGS = {
    "WORKER_ENGINE": "fake",
    "WORKER_FAKE_LATENCY": "a_s=0.003,b_s=2e-5,decode_a_s=0.02",
    "GATEWAY_LINGER_S": "3",
}
NUM_TOKENS = 150
PAUSE_S = 4.0
LIMIT_S = 120.0


class Cell:
    """A mesh that can be started again at its address."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._running = ExitStack()
        self._mesh: RunningMesh | None = None
        self.port = free_port()

    def start(self) -> None:
        self._mesh = self._running.enter_context(
            running_mesh(self._folder, model=self._model, settings={**SETTINGS, "GATEWAY_PORT": str(self.port)})
        )

    def stop(self) -> None:
        """End it in good order: what runs there ends first."""
        self._running.close()

    def kill(self) -> None:
        """End all of its processes at once: they end with their supervisor."""
        assert self._mesh is not None
        os.kill(self._mesh.record.supervisor.pid, signal.SIGKILL)
        self._running.close()


def configuration(ports: dict[str, int], listen: int) -> str:
    """The file that is deployed, with other addresses."""
    text = re.sub(r"bind :8000", f"bind 127.0.0.1:{listen}", CONFIG.read_text())
    return re.sub(r"server (\w)1 \S+", lambda found: f"server {found[1]}1 127.0.0.1:{ports[found[1]]}", text)


@contextmanager
def running_balancer(folder: Path, cells: dict[str, Cell]) -> Generator[str]:
    """Start HAProxy before the cells; its URL."""
    listen = free_port()
    file = folder / "haproxy.cfg"
    file.write_text(configuration({name: cell.port for name, cell in cells.items()}, listen))
    process = subprocess.Popen(ending_with_us(["haproxy", "-db", "-f", str(file)]))
    try:
        yield f"http://127.0.0.1:{listen}"
    finally:
        process.kill()
        process.wait()


async def served(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(LIMIT_S):
        while True:
            try:
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def disturb(load: StreamLoad, name: str, do: Callable[[], object], *, loses_begun: bool = False) -> int:
    """Do it, and wait for the streams that it may have touched; return how many are not as they should be."""
    await asyncio.sleep(PAUSE_S)
    begin_s, first = time.monotonic(), len(load.streams)
    await asyncio.to_thread(do)
    await asyncio.sleep(PAUSE_S)
    took_s, running = time.monotonic() - begin_s, list(load.open)
    while any(each.ended_s is None for each in running):
        await load.ended(1)
    touched = StreamLoad(load.undisturbed, load.streams[first:])
    not_begun = [each.error for each in touched.streams if each.error is not None and not each.token_ids]
    print(
        f"{name:34} {took_s:6.1f} s {len(touched.streams):8} {len(touched.failed):5} {len(not_begun):10} "
        f"{len(touched.differ):7}",
        flush=True,
    )
    for reason in dict.fromkeys((*touched.failed, *touched.differ)):
        print(f"    {reason}")
    return len(touched.differ) + len(not_begun if loses_begun else touched.failed)


async def run(cells: dict[str, Cell], url: str, num_streams: int) -> int:
    requests, num_bad = requests_of(3, [24 + 9 * index for index in range(12)], NUM_TOKENS), 0
    await served(url)
    for cell in cells.values():
        await served(f"http://127.0.0.1:{cell.port}")
    other = cells["b"]
    async with running_load(url, "model", requests, at_once=num_streams, max_retries=0) as load:
        await load.all_draw(num_streams)
        print(f"{'event':34} {'took':>8} {'streams':>8} {'lost':>5} {'not begun':>10} {'differ':>7}")
        num_bad += await disturb(load, "nothing", lambda: None)
        num_bad += await disturb(load, "cell b is stopped", other.stop)
        num_bad += await disturb(load, "cell b is started again", other.start)
        num_bad += await disturb(load, "cell b is lost", other.kill, loses_begun=True)
        num_bad += await disturb(load, "cell b is started again", other.start)
    return num_bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=24)
    options = parser.parse_args()
    if shutil.which("haproxy") is None:
        unavailable("haproxy is not on the path (Debian's package haproxy)")
    print(heading(f"two cells of two instances behind HAProxy, {options.streams} streams of {NUM_TOKENS} tokens"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = write_checkpoint(folder / "model", seed=3)
        cells = {each: Cell(folder / each, model) for each in NAMES}
        url = stack.enter_context(running_balancer(folder, cells))
        for cell in cells.values():
            cell.start()
            stack.callback(cell.stop)
        num_bad = asyncio.run(run(cells, url, options.streams))
    print(f"{num_bad} streams are not as they should be" if num_bad else "0 differ, and none was lost that need not be")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
