"""The choice of one leader among several schedulers: pure, and without a clock that two of them share.

A *lease record* in a store names the leader. A scheduler reads the record before it writes (compare and swap), and each
write of a leader raises its ``beat``. A leader may lead for a *hold* after it **sent** its last successful write.
Another one may take the lease when it has **seen** the same beat for ``lease_s``. The other one saw each beat after
that was sent, and a hold is shorter than a lease. So the leader has stopped before the other one begins. This holds as
long as their clocks do not differ in *rate* by more than the margin, a quarter of the lease.

A candidate may also *ask* a leader for the lease, on behalf of a gateway that reaches the candidate and not the leader.
The candidate writes its address into the record. The leader reads the request at its next renewal. The leader either
releases the lease for that address or removes the request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

#: Part of a lease that its holder does not use.
MARGIN = 0.25

#: Renewals in a lease, and reads in a lease by waiting candidates and by a holder whose renewal failed.
RENEWALS, LOOKS = 4, 12

#: Seconds between two requests for a lease by one candidate. Each request is judged anew.
ASK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Content of the store, as JSON. A renamed field has to be read under both names.

    `holder_id` identifies a process; without one, no scheduler leads. `address` is where the holder serves. Each
    holder's `term` is higher than all before, and each write of a leader raises `beat`. `state` is the operators'
    desired state, for the next holder. `asked_by` is the address of the candidate that asks for the lease or was chosen
    by the last leader. The gateway `asked_for` reaches that candidate and not the holder.
    """

    holder_id: str = ""
    address: str = ""
    term: int = 0
    beat: int = 0
    state: str = ""
    asked_by: str = ""
    asked_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWrite:
    """A write to try: ``record``, if the store still has ``version``; None means that the store has no record."""

    record: LeaseRecord
    version: str | None


class Candidate:
    """A scheduler's view of the record: the last one seen, the next write, and whether the scheduler leads.

    All times are of its own clock, which must advance while the machine is suspended.
    """

    def __init__(self, holder_id: str, address: str, lease_s: float) -> None:
        self._holder_id = holder_id
        self._address = address
        self._lease_s = lease_s
        self._hold_s = lease_s * (1 - MARGIN)
        self._record: LeaseRecord | None = None  # the last one seen
        self._version: str | None = None
        self._is_known = False  # whether the store is known to have `_record`
        self._changed_s = inf  # when the record's beat was first seen
        self._tried: LeaseRecord | None = None  # the last write without an answer
        self._tried_s = -inf
        self._until_s = -inf  # end of the hold
        self._sent_s = -inf  # time of the last successful write
        self.state = ""  # desired state to keep while leading
        self._asks_for = ""  # gateway to ask for
        self._next_ask_s = -inf
        self._refuses = False  # whether to remove a request from the record

    # --- state ---

    def leads(self, now_s: float) -> bool:
        """Return whether this scheduler may command at ``now_s``."""
        return now_s < self._until_s

    @property
    def until_s(self) -> float:
        """Clock time in seconds when the hold ends if nothing more is written; -inf if this scheduler has never led."""
        return self._until_s

    @property
    def term(self) -> int:
        """Term of the record that was seen last."""
        return 0 if self._record is None else self._record.term

    @property
    def successor(self) -> str:
        """Address of another holder in the record that was seen last; empty if there is no other holder."""
        return "" if self._record is None or self._is_ours else self._record.address

    @property
    def is_kept(self) -> bool:
        """Whether the store has the present ``state``, written by this scheduler."""
        return self._is_ours and self._record is not None and self._record.state == self.state

    @property
    def request(self) -> LeaseRecord | None:
        """The record, if another candidate asks this leader for the lease and was not refused; otherwise None."""
        record = self._record
        is_asked = record is not None and self._is_ours and record.asked_by and not self._refuses
        return record if is_asked else None

    def leader(self, now_s: float) -> str:
        """Return the address of the present leader; empty if there is none, or if its renewal is late."""
        record = self._record
        is_late = now_s - self._changed_s > 2 * self._lease_s / RENEWALS
        return "" if record is None or not record.holder_id or is_late else record.address

    def next_s(self, now_s: float) -> float:
        """Return when to look, or to write, again."""
        if self._is_known and self.leads(now_s):
            return self._sent_s + self._lease_s / RENEWALS
        return now_s + self._lease_s / LOOKS

    @property
    def _is_ours(self) -> bool:
        return self._record is not None and self._record.holder_id == self._holder_id

    # --- events ---

    def ask(self, gateway_id: str, now_s: float) -> None:
        """Ask the present leader for the lease, because this gateway reaches this candidate alone.

        Ignored within `ASK_EVERY_S` of the last request.
        """
        if now_s >= self._next_ask_s:
            self._asks_for, self._next_ask_s = gateway_id, now_s + ASK_EVERY_S

    def refuse(self) -> None:
        """Remove the request for the lease with the next write."""
        self._refuses = True

    def observed(self, record: LeaseRecord | None, version: str | None, now_s: float) -> None:
        """Note what the store had, some time before ``now_s``; None if it had no record."""
        if version != self._version or self._changed_s == inf:
            self._take(record, version, now_s)
        self._is_known = True
        if record is not None and self._is_ours and self._tried is not None and record.beat == self._tried.beat:
            self._has_written(now_s)  # the answer was lost
        elif not self._is_ours:
            self._until_s = min(self._until_s, now_s)  # another scheduler took the lease

    def attempt(self, now_s: float, at_least: int) -> LeaseWrite | None:
        """Return the write that is due; None if none is, or the record has to be read first.

        The first term, in a store without a record, is at least ``at_least``. With a wall clock's seconds, terms that
        were heard before do not come again after a store was emptied.
        """
        if not self._is_known:
            return None
        before = self._record or LeaseRecord()
        if self.leads(now_s):
            record = replace(before, beat=before.beat + 1, state=self.state)
            if self._refuses:
                record = replace(record, asked_by="", asked_for="")
            is_due = now_s >= self.next_s(now_s) or before.state != self.state
        elif self._asks_for and self.leader(now_s):
            record = replace(before, asked_by=self._address, asked_for=self._asks_for)
            is_due = not before.asked_by
        else:
            record = LeaseRecord(
                holder_id=self._holder_id,
                address=self._address,
                term=max(before.term + 1, at_least),
                beat=before.beat + 1,
                state=before.state,
            )
            # A scheduler that has led once does not lead again: it does not know what happened meanwhile.
            is_given = not before.holder_id and before.asked_by in ("", self._address)
            is_free = is_given or now_s - self._changed_s >= self._lease_s
            is_due = is_free and self._until_s == -inf
        return LeaseWrite(record=record, version=self._version) if is_due else None

    def release(self, to: str = "") -> LeaseWrite | None:
        """Return the write by which a leader that has stopped commanding lets others lead at once; None if it holds no
        lease.

        ``to`` is the address of the only candidate that may; the others wait for ``lease_s`` as for a silent leader.
        """
        self._until_s = min(self._until_s, self._sent_s)
        if not self._is_known or not self._is_ours or self._record is None:
            return None
        record = LeaseRecord(term=self._record.term, beat=self._record.beat + 1, state=self.state, asked_by=to)
        return LeaseWrite(record=record, version=self._version)

    def sent(self, attempt: LeaseWrite, now_s: float) -> None:
        """Note that a write is being sent: until an answer comes, the store's content is unknown."""
        self._tried, self._tried_s = attempt.record, now_s
        self._is_known = False

    def written(self, attempt: LeaseWrite, version: str, now_s: float) -> None:
        """Note that the store has accepted the write that was sent last."""
        self._take(attempt.record, version, now_s)
        self._is_known = True
        if self._is_ours:
            self._refuses = self._refuses and bool(attempt.record.asked_by)
            self._has_written(now_s)
        elif attempt.record.asked_by == self._address:
            self._asks_for = ""

    def _take(self, record: LeaseRecord | None, version: str | None, now_s: float) -> None:
        if self._changed_s == inf or record is None or self._record is None or record.beat != self._record.beat:
            self._changed_s = now_s
        self._record, self._version = record, version

    def _has_written(self, now_s: float) -> None:
        if self._until_s == -inf:
            assert self._record is not None
            self.state = self._record.state
        elif not self.leads(now_s):
            return  # too late: the hold is over
        self._sent_s = max(self._sent_s, self._tried_s)
        self._until_s = max(self._until_s, self._tried_s + self._hold_s)
        self._tried = None
