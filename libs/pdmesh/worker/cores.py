"""Cores that the workers of a host lend each other, and the shared table that says which workers are idle.

Each worker owns as many cores as the engine has threads. A worker that computes uses the own cores and a share of the
idle workers' cores. The worker decides anew before each layer: an owner that begins a step never waits, and has its
cores for itself after at most one layer of the borrower.

The table has a row of 64-bit words for each worker, and only that worker writes to the row. A plain store of an aligned
word is enough: each decision follows from single words, not from the order of two writes. A word that is read too early
or too late makes a worker use too few or too many cores for one layer. Bits do not depend on the number of threads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pdmesh.errors import ConfigError
from pdmesh.host import num_usable_cores

#: Rows of the table. Workers beyond this number neither lend nor borrow.
NUM_ROWS = 64

#: Words of a row, which is a cache line.
_ROW_WORDS = 8
_NUM_BYTES = 8 * _ROW_WORDS * NUM_ROWS

# Words of a row. While the worker computes, the state is the time of the last layer. While the worker is idle, the
# state is the negative of the time when it became idle. 0 marks an empty row. Times are nanoseconds of the monotonic
# clock, which all processes of a host share.
_PID, _START_TICKS, _NUM_CORES, _STATE = range(4)

#: A worker between two steps keeps its cores: a borrowed layer would outlast the gap.
IDLE_AFTER_NS = 5_000_000

#: Older states are looked up, since a layer may take long. A worker whose process has ended or is stopped is idle.
STALE_AFTER_NS = 2_000_000_000

#: Cores that cannot be divided evenly go to each borrower in turn.
TURN_NS = 100_000_000

#: Share of the time that the engine's thread sleeps where a process beside the mesh uses a lent core: the threads of a
#: layer wait for each other, and the layer takes longer than on the own cores. Judged over `JUDGED_NS` of lent layers.
MAX_ASLEEP_SHARE, JUDGED_NS = 0.45, 100_000_000

#: Pause in borrowing after lent cores turned out to be in use: the first pause, doubled each time, and the longest one.
FIRST_PAUSE_NS, LAST_PAUSE_NS = 250_000_000, 8_000_000_000

#: States of a process that computes nothing: ended, or by proc(5) stopped or traced.
_HALTED = frozenset(("", "T", "t"))


def create_cores_file() -> Path:
    """Return the path of a new table, which lasts as long as this process. Raise OSError if the system refuses.

    Workers open the table by the path, whichever process starts them.
    """
    fd = os.memfd_create("pdmesh-cores")
    os.ftruncate(fd, _NUM_BYTES)
    return Path(f"/proc/{os.getpid()}/fd/{fd}")


def process_state(pid: int, start_ticks: int) -> str:
    """Return the letter of proc(5) for the process with this pid and start time; empty if the process has ended."""
    found = _look_up(pid)
    return "" if found is None or found[1] != start_ticks or found[0] in "ZX" else found[0]


def _look_up(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and its start time; None if the process is unknown."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return None


class LentLayers(NamedTuple):
    """Number of layers, and of cores that they borrowed, summed over them."""

    num_layers: int = 0
    num_lent: int = 0

    def mean_since(self, before: LentLayers) -> float:
        """Return the mean number of lent cores of the layers since ``before``."""
        return (self.num_lent - before.num_lent) / max(1, self.num_layers - before.num_layers)


class LentCores:
    """A worker's row of the table, and the view of other rows. Implements `pdmesh.engine.lending.Cores`."""

    def __init__(
        self,
        words: memoryview,
        num_own: int,
        *,
        pid: int,
        start_ticks: int,
        num_usable: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        busy_clock_ns: Callable[[], int] = time.thread_time_ns,
        state_of: Callable[[int, int], str] = process_state,
    ) -> None:
        """Take a row of the table ``words`` that is free or whose worker has ended. Raises ConfigError if none is.

        ``busy_clock_ns`` returns the processor time of the calling thread.
        """
        self.num_own = num_own
        self._num_layers = self._num_lent = 0
        self._words = words
        self._states = words[_STATE::_ROW_WORDS]
        self._num_usable = num_usable
        self._clock_ns = clock_ns
        self._busy_clock_ns = busy_clock_ns
        #: Begin of the current layer on lent cores, by both clocks.
        self._lent_since: tuple[int, int] | None = None
        #: Sums over the layers that are not judged yet.
        self._lent_ns = self._busy_ns = 0
        self._paused_until_ns = self._pause_ns = 0
        self._state_of = state_of
        #: By row: when the process was looked up, and whether it was halted.
        self._looked_up: dict[int, tuple[int, bool]] = {}
        self._row = self._free_row()
        for word, value in ((_STATE, 0), (_PID, pid), (_START_TICKS, start_ticks), (_NUM_CORES, num_own)):
            self._write(word, value)
        self.release()

    def occupy(self) -> None:
        """Mark this worker as computing."""
        self._write(_STATE, self._clock_ns())

    def release(self) -> None:
        """Lend the own cores until `occupy`."""
        self._write(_STATE, -self._clock_ns())

    def take(self) -> int:
        """Return the number of cores to compute with until `give_back`, or until the next call."""
        now_ns = self._clock_ns()
        self._write(_STATE, now_ns)
        self._num_layers += 1
        num_lent = 0 if now_ns < self._paused_until_ns else self._num_lent_at(now_ns)
        self._num_lent += num_lent
        self._lent_since = (now_ns, self._busy_clock_ns()) if num_lent else None
        return self.num_own + num_lent

    def give_back(self) -> None:
        """End a layer, and pause borrowing if its threads waited for processes outside the mesh."""
        if self._lent_since is None:
            return
        now_ns = self._clock_ns()
        self._lent_ns += now_ns - self._lent_since[0]
        self._busy_ns += self._busy_clock_ns() - self._lent_since[1]
        self._lent_since = None
        if self._lent_ns < JUDGED_NS:
            return
        if self._busy_ns < (1 - MAX_ASLEEP_SHARE) * self._lent_ns:
            self._pause_ns = min(max(FIRST_PAUSE_NS, 2 * self._pause_ns), LAST_PAUSE_NS)
            self._paused_until_ns = now_ns + self._pause_ns
        else:
            self._pause_ns = 0
        self._lent_ns = self._busy_ns = 0

    def _num_lent_at(self, now_ns: int) -> int:
        """Return this worker's share of the cores that are idle now."""
        num_idle, num_busy = 0, self.num_own
        num_borrowers, rank = 1, 0
        for row, state in enumerate(self._states.tolist()):
            if not state:
                break
            if row == self._row:
                rank = num_borrowers - 1
                continue
            num_cores = min(max(0, self._words[row * _ROW_WORDS + _NUM_CORES]), self._num_usable)
            if now_ns + state > IDLE_AFTER_NS if state < 0 else self._is_halted(row, state, now_ns):
                num_idle += num_cores
            else:
                num_busy += num_cores
                num_borrowers += state > 0
        num_lendable = min(num_idle, self._num_usable - num_busy)
        if num_lendable <= 0:
            return 0
        share, rest = divmod(num_lendable, num_borrowers)
        return share + ((rank + now_ns // TURN_NS) % num_borrowers < rest)

    @property
    def lent_layers(self) -> LentLayers:
        """Totals over all layers so far."""
        return LentLayers(self._num_layers, self._num_lent)

    def _is_halted(self, row: int, state: int, now_ns: int) -> bool:
        """Whether the worker of a row has not finished a layer for long, and its process has ended or is stopped."""
        if now_ns - state < STALE_AFTER_NS:
            return False
        looked_at_ns, is_halted = self._looked_up.get(row, (0, False))
        if now_ns - looked_at_ns >= STALE_AFTER_NS // 4:
            is_halted = self._state_of(self._read(row, _PID), self._read(row, _START_TICKS)) in _HALTED
            self._looked_up[row] = now_ns, is_halted
        return is_halted

    def _free_row(self) -> int:
        for row in range(NUM_ROWS):
            is_taken = self._read(row, _STATE) and self._state_of(self._read(row, _PID), self._read(row, _START_TICKS))
            if not is_taken:
                return row
        raise ConfigError(f"{NUM_ROWS} workers of this host lend cores already: set worker.lend_cores to false")

    def _read(self, row: int, word: int) -> int:
        return int(self._words[row * _ROW_WORDS + word])

    def _write(self, word: int, value: int) -> None:
        self._words[self._row * _ROW_WORDS + word] = value


def open_cores(file: Path, num_own: int) -> LentCores:
    """Take a row of the table that `create_cores_file` made, for this process.

    Raise ConfigError if the table cannot be used.
    """
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot open worker.cores_file, {file}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _NUM_BYTES or found.st_uid != os.geteuid():
            raise ConfigError(f"worker.cores_file, {file}, is not a table of cores: leave the setting to `pdmesh up`")
        own = _look_up(os.getpid())
        if own is None:
            raise ConfigError("worker.cores_file is set, but /proc does not show this process: set it to none")
        words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("q")
        # Without the lock, two workers that start at once could find the same row.
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            return LentCores(words, num_own, pid=os.getpid(), start_ticks=own[1], num_usable=num_usable_cores())
        finally:
            # Unlock explicitly, because the mapping keeps a duplicate of the descriptor open.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
