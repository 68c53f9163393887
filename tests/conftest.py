"""Fixtures every test may use, how much is drawn, what a test takes and leaves to read if it fails, and what is skipped
where a machine lacks it.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import Context
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh_logs import warnings_since
from pdmesh_testing.rotation import left_out, read_record

# `pytest --hypothesis-profile=all` draws as many examples as a test asks for, any other run an eighth (see
# `pdmesh_testing.examples`). A machine that is busy is slow: how long an example takes says nothing about the code.
settings.register_profile("all", deadline=None, max_examples=100)
settings.register_profile("eighth", deadline=None, max_examples=12)
settings.load_profile("eighth")

RECORD = read_record(Path(__file__).with_name("cpu_seconds.json"))

NO_DEVICE = "torch finds no CUDA device"

_FOLDER, _BEGAN_S = pytest.StashKey[Path](), pytest.StashKey[float]()


class _Loop(asyncio.SelectorEventLoop):
    """Takes no more of gRPC's completions once it is closed.

    Their queue belongs to the process; what it still has for a loop that is gone is raised in the one that reads it.
    """

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed() and str(callback.__module__).startswith("grpc."):
            return asyncio.Handle(callback, args, self)
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """grpc.aio runs on asyncio alone, so everything that meets it does."""
    return "asyncio", {"loop_factory": _Loop}


@pytest.fixture
async def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a context of 512 tokens. No test writes to it."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, as each rank does beside others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let every task of an asynchronous test end before its loop is closed.

    gRPC's queue of completions belongs to the process, and ``stop`` of a server does not wait for its calls: what
    completes after the loop was closed would be raised in the next test, as "Event loop is closed".
    """
    if "anyio_backend" not in request.fixturenames:
        yield
        return
    loop: asyncio.AbstractEventLoop = request.getfixturevalue("event_loop")
    of_fixtures = asyncio.all_tasks(loop)
    yield
    while left := asyncio.all_tasks(loop) - of_fixtures:
        _, pending = loop.run_until_complete(asyncio.wait(left, timeout=20))
        assert not pending, f"outlives its test: {pending}"


@pytest.fixture(autouse=True)
def began(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.node.stash[_FOLDER] = tmp_path_factory.getbasetemp()
    request.node.stash[_BEGAN_S] = time.time() - 1.0  # times of files are coarse


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Quote what meshes warned of while a test failed: their folders are gone where its report is read."""
    report = yield
    if report.failed and _FOLDER in item.stash:
        warned = "\n".join(warnings_since(item.stash[_FOLDER], item.stash[_BEGAN_S]))
        report.sections.append(("warnings of meshes", warned))
        for properties in (item.user_properties, report.user_properties):  # of later reports, and of this one
            properties.append(("warned", warned))
    return report


@pytest.fixture(autouse=True)
def cpu_s(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note the CPU time of each test, in seconds, of this process and its ended children; ``run.py`` lists it."""
    began_s = cpu_time_s()
    yield
    request.node.user_properties.append(("cpu_s", round(cpu_time_s() - began_s, 3)))


@pytest.fixture(autouse=True, scope="module")
def module_cpu_s(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note the CPU time of a test file with its fixtures, where ``run.py --record`` collects the notes."""
    began_s = cpu_time_s()
    yield
    if folder := os.environ.get("TESTS_CPU_NOTES"):
        with Path(folder, str(os.getpid())).open("a", encoding="utf-8") as notes:
            name = request.path.relative_to(request.config.rootpath).as_posix()
            notes.write(f"{name} {cpu_time_s() - began_s:.3f}\n")


def pytest_runtest_setup() -> None:
    """Skip the slow tests that a run of CI has no time for: the next runs have other shares of them."""
    if time.time() > float(os.environ.get("TESTS_SLOW_UNTIL", "inf")):
        pytest.skip("the time for slow tests is over in this run of CI")


def cpu_time_s() -> float:
    return sum(os.times()[:4])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what is worth running again with more examples."""
    if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
        item.add_marker("drawn")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out today as ``slow``, and skip ``gpu`` tests where there is no CUDA device."""
    day = int(os.environ.get("TESTS_DAY", datetime.now(UTC).toordinal()))
    by_name = {
        name_of(item): item
        for item in items
        if item.get_closest_marker("slow") is None and item.get_closest_marker("always") is None
    }
    for name in left_out(list(by_name), RECORD, day):
        by_name[name].add_marker("slow")
    skip_without_device(items)


def name_of(item: pytest.Item) -> str:
    """Return the name that a JUnit report has for a test: classname and name."""
    place = item.nodeid.removesuffix(f"::{item.name}")
    return f"{place.replace('.py', '').replace('/', '.').replace('::', '.')}::{item.name}"


def skip_without_device(items: Sequence[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device. Torch is loaded only if there are such tests."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection: each full one would walk them for half a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much of the engine on a device was not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_DEVICE in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests were skipped: {NO_DEVICE}. See tests/gpu/recipe.sh.")
