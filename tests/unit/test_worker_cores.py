"""Workers lend each other idle cores: the table's laws under any interleaving, and real processes that end or stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.cli.plan import WorkerSpecs, with_brief_spinning
from pdmesh.cli.state_folder import StateFolder
from pdmesh.config import MeshConfig, WorkerConfig
from pdmesh.config_sources import load_config
from pdmesh.errors import ConfigError
from pdmesh.operations import PoolCounts
from pdmesh.worker.cores import (
    FIRST_PAUSE_NS,
    IDLE_AFTER_NS,
    JUDGED_NS,
    LAST_PAUSE_NS,
    NUM_ROWS,
    STALE_AFTER_NS,
    TURN_NS,
    LentCores,
    create_cores_file,
    open_cores,
    process_state,
)

LIMIT_S = 30.0


class Host:
    """A table, a clock, and the processes that run."""

    def __init__(self, num_usable: int) -> None:
        self.words = memoryview(bytearray(NUM_ROWS * 64)).cast("q")
        self.num_usable = num_usable
        self.now_ns = 1_000_000_000
        self.busy_ns = 0  # processor time of the thread that computes
        self.state_of: dict[int, str] = {}  # as proc(5) has it, of the processes that exist
        self._last_pid = 0

    def start(self, num_own: int) -> LentCores:
        self._last_pid += 1
        self.state_of[self._last_pid] = "S"
        return LentCores(
            self.words,
            num_own,
            pid=self._last_pid,
            start_ticks=10 * self._last_pid,
            num_usable=self.num_usable,
            clock_ns=lambda: self.now_ns,
            busy_clock_ns=lambda: self.busy_ns,
            state_of=lambda pid, ticks: self.state_of.get(pid, "") if ticks == 10 * pid else "",
        )

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns


def test_a_lone_worker_has_the_cores_of_those_that_are_idle_until_they_compute() -> None:
    host = Host(num_usable=4)
    first, second = host.start(1), host.start(3)
    host.pass_time(IDLE_AFTER_NS + 1)
    first.occupy()
    assert first.take() == 4
    second.occupy()
    assert first.take() == 1
    assert second.take() == 3
    second.release()
    assert first.take() == 1, "the next step may begin at once"
    host.pass_time(IDLE_AFTER_NS + 1)
    assert first.take() == 4


def test_borrowers_share_evenly_and_take_turns_at_the_rest() -> None:
    host = Host(num_usable=3)
    first, second, _ = (host.start(1) for _ in range(3))
    first.occupy()
    second.occupy()
    taken: set[tuple[int, int]] = set()
    for _ in range(4):
        host.pass_time(TURN_NS)
        taken.add((first.take(), second.take()))
    assert taken == {(1, 2), (2, 1)}


def test_no_more_cores_are_used_than_there_are() -> None:
    """As where each of two workers was given all cores by hand, or a worker was not started again."""
    host = Host(num_usable=2)
    first, _ = host.start(2), host.start(2)
    host.pass_time(IDLE_AFTER_NS + 1)
    first.occupy()
    assert first.take() == 2


def test_the_mean_number_of_lent_cores_is_that_of_the_layers_since() -> None:
    host = Host(num_usable=4)
    first, second = host.start(2), host.start(2)
    first.occupy()
    host.pass_time(IDLE_AFTER_NS + 1)
    first.take()
    before = first.lent_layers
    assert first.lent_layers.mean_since(before) == 0
    first.take()
    second.occupy()
    first.take()
    assert first.lent_layers.mean_since(before) == 1


def layer(host: Host, cores: LentCores, ns: int, *, busy_ns: int) -> int:
    """Compute a layer; return with how many cores."""
    num_cores = cores.take()
    host.pass_time(ns)
    host.busy_ns += busy_ns
    cores.give_back()
    return num_cores


def test_borrowing_pauses_while_processes_beside_the_mesh_use_the_cores() -> None:
    host = Host(num_usable=2)
    cores, _ = host.start(1), host.start(1)
    host.pass_time(IDLE_AFTER_NS + 1)
    half = JUDGED_NS // 2
    assert [layer(host, cores, half, busy_ns=half - 1) for _ in range(8)] == [2] * 8
    for pause_ns in (*(FIRST_PAUSE_NS << recurrence for recurrence in range(5)), LAST_PAUSE_NS, LAST_PAUSE_NS):
        assert [layer(host, cores, half, busy_ns=half // 2) for _ in range(2)] == [2, 2]
        assert layer(host, cores, pause_ns - 1, busy_ns=0) == 1
        assert cores.take() == 1
        host.pass_time(1)
    assert [layer(host, cores, half, busy_ns=half) for _ in range(2)] == [2, 2]
    assert [layer(host, cores, half, busy_ns=0) for _ in range(2)] == [2, 2]
    assert layer(host, cores, FIRST_PAUSE_NS, busy_ns=0) == 1
    assert cores.take() == 2


def test_the_row_of_a_worker_that_is_gone_is_taken_and_a_full_table_refuses() -> None:
    host = Host(num_usable=2)
    for _ in range(NUM_ROWS):
        host.start(1)
    with pytest.raises(ConfigError, match="lend_cores to false"):
        host.start(1)
    host.state_of[8] = "T"
    with pytest.raises(ConfigError, match="lend_cores to false"):
        host.start(1)
    del host.state_of[7]
    host.start(1)


class Lending(RuleBasedStateMachine):
    """Workers that begin and end steps, compute layers, are stopped, continued, killed and started again."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host(num_usable=6)
        self.workers: dict[int, LentCores] = {}
        self.changed_ns: dict[int, int] = {}  # when each worker's row was last written
        self.busy: set[int] = set()
        self.halted: set[int] = set()
        for num_own in (1, 2, 3):
            self._start(num_own)

    def _start(self, num_own: int) -> None:
        cores = self.host.start(num_own)
        name = max(self.host.state_of)
        self.workers[name] = cores
        self.changed_ns[name] = self.host.now_ns

    def _present(self, number: int) -> int:
        present = sorted(self.workers.keys() - self.halted)
        return present[number % len(present)]

    def _frees(self, name: int) -> bool:
        """Whether a worker's cores may be used by others."""
        age_ns = self.host.now_ns - self.changed_ns[name]
        if name in self.busy:
            return name in self.halted and age_ns >= STALE_AFTER_NS
        return age_ns > IDLE_AFTER_NS

    @rule(ns=st.sampled_from([1, 1_000_000, IDLE_AFTER_NS, TURN_NS, STALE_AFTER_NS, 3 * STALE_AFTER_NS]))
    def time_passes(self, ns: int) -> None:
        self.host.pass_time(ns)

    @precondition(lambda self: self.workers.keys() - self.halted)
    @rule(number=st.integers(0, 5))
    def a_step_begins(self, number: int) -> None:
        name = self._present(number)
        self.workers[name].occupy()
        self.busy.add(name)
        self.changed_ns[name] = self.host.now_ns

    @precondition(lambda self: self.workers.keys() - self.halted)
    @rule(number=st.integers(0, 5))
    def work_ends(self, number: int) -> None:
        name = self._present(number)
        self.workers[name].release()
        self.busy.discard(name)
        self.changed_ns[name] = self.host.now_ns

    @precondition(lambda self: self.busy - self.halted)
    @rule(number=st.integers(0, 5))
    def a_layer_begins(self, number: int) -> None:
        computing = sorted(self.busy - self.halted)
        name = computing[number % len(computing)]
        self.changed_ns[name] = self.host.now_ns
        self._check(name, self.workers[name].take())

    @precondition(lambda self: self.workers.keys() - self.halted)
    @rule(number=st.integers(0, 5), is_killed=st.booleans())
    def a_worker_is_halted(self, number: int, is_killed: bool) -> None:
        name = self._present(number)
        self.halted.add(name)
        self.host.state_of[name] = "T"
        if is_killed:
            del self.host.state_of[name]
            num_own = self.workers[name].num_own
            del self.workers[name]  # whatever it had, the next one takes the row
            self.halted.discard(name)
            self.busy.discard(name)
            self._start(num_own)

    @precondition(lambda self: self.halted)
    @rule()
    def a_worker_continues(self) -> None:
        name = min(self.halted)
        self.halted.remove(name)
        self.host.state_of[name] = "R"

    def _check(self, name: int, num_cores: int) -> None:
        own = self.workers[name].num_own
        free = sum(cores.num_own for other, cores in self.workers.items() if other != name and self._frees(other))
        assert own <= num_cores <= own + free, "nothing is taken from a worker that computes"

    @precondition(lambda self: self.busy - self.halted)
    @invariant()
    def all_idle_cores_are_used_and_none_twice(self) -> None:
        """Where nothing changes while all that compute decide."""
        self.host.pass_time(STALE_AFTER_NS // 2)  # so that halted processes are looked up
        computing = sorted(self.busy - self.halted)
        taken: dict[int, int] = {}
        for name in computing:
            self.changed_ns[name] = self.host.now_ns
            taken[name] = self.workers[name].take()
            self._check(name, taken[name])
        kept = {name for name in self.workers if name in self.busy or not self._frees(name)} - set(computing)
        idle_now = {name for name in kept if self._frees(name)}
        kept -= idle_now
        used = sum(taken.values()) + sum(self.workers[name].num_own for name in kept)
        if not self.halted:
            assert used == sum(cores.num_own for cores in self.workers.values())
        assert used <= self.host.num_usable


TestLending = Lending.TestCase


@given(words=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=8, max_size=64))
def test_whatever_others_write_a_worker_has_its_own_cores_and_no_more_than_there_are(words: list[int]) -> None:
    host = Host(num_usable=4)
    cores = host.start(1)
    cores.occupy()
    for index, word in enumerate(words):
        host.words[8 + index] = word
    assert 1 <= cores.take() <= 4


def computing_process(file: Path) -> subprocess.Popen[str]:
    """Start a process that takes a row, begins a step, and does nothing more."""
    code = (
        "import sys, time; from pathlib import Path; from pdmesh.worker.cores import open_cores; "
        "cores = open_cores(Path(sys.argv[1]), 1); cores.occupy(); print('computes', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "computes\n"
    return process


def test_a_process_that_is_stopped_or_killed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process sees it: a busy word expires once the process that wrote the word does not run."""
    monkeypatch.setattr("pdmesh.worker.cores.num_usable_cores", lambda: 2)
    file = create_cores_file()
    process = computing_process(file)
    try:
        cores = open_cores(file, 1)
        now_ns = [0]
        monkeypatch.setattr(cores, "_clock_ns", lambda: now_ns[0])
        cores.occupy()

        def at(seconds: float) -> int:
            now_ns[0] = int((began_s + seconds) * 1e9)
            return cores.take()

        began_s = time.monotonic()
        assert at(1) == 1
        assert at(60) == 1, "a layer may take long"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert at(120) == 2
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert at(180) == 1
        process.kill()
        process.wait(LIMIT_S)
        assert at(240) == 2
    finally:
        process.kill()
        process.communicate()


def test_workers_that_start_together_get_rows_of_their_own() -> None:
    file = create_cores_file()
    processes = [computing_process(file) for _ in range(3)]
    try:
        cores = open_cores(file, 1)
        assert cores._row == 3
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot open worker\.cores_file"):
        open_cores(tmp_path / "none", 1)
    (tmp_path / "short").write_bytes(b"1")
    with pytest.raises(ConfigError, match="not a table of cores"):
        open_cores(tmp_path / "short", 1)
    with pytest.raises(ConfigError, match="not a table of cores"):
        open_cores(Path("/dev/zero"), 1)


def test_a_process_is_known_by_pid_and_start() -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert process_state(os.getpid(), int(fields[19])) == "R"
    assert process_state(os.getpid(), int(fields[19]) + 1) == ""
    assert process_state(0, 0) == ""


def test_workers_of_a_mesh_get_its_table(tmp_path: Path) -> None:
    config = MeshConfig(worker=WorkerConfig(num_threads=1))
    specs = WorkerSpecs(config, StateFolder("m", tmp_path), {}, Path("/proc/1/fd/7"), {"address": "127.0.0.1:1"})
    for spec in specs.of_pools(PoolCounts(prefill=1, decode=1, mixed=0)):
        assert load_config(None, spec.environment, {}).worker.cores_file == Path("/proc/1/fd/7")


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_idle_threads_spin_briefly_unless_the_user_says_otherwise(name: str) -> None:
    assert int(with_brief_spinning({"A": "b"})["GOMP_SPINCOUNT"]) < 100_000
    assert with_brief_spinning({name: "7"}) == {name: "7"}
