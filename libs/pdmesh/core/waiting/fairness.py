"""Fair shares between tenants: a virtual token counter for each (Sheng et al., Fairness in Serving LLMs, OSDI 2024).

Of those with requests in line, the one with the least counter is served next. A tenant is charged for a request when it
is placed: its prompt tokens, those whose KV is kept at a tenth, and twice the output tokens that are expected of it,
from what its requests drew before. When the request ends, what it drew takes the place of what was expected. So nobody
gets a place for nothing in between, and in the end each has paid for what it got. A counter goes up by tokens over the
share of the key.

Whole numbers, so that sums depend on no order, and a replay of commands and reports has the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.model import Request, RequestKey

#: Of a counter in a token, so that it can be divided by shares.
UNITS = 1000

#: An output token costs as much as so many of a prompt (as in the paper, and about as on price lists).
OUTPUT_COST = 2

#: So many prompt tokens whose KV is kept cost as much as one that is computed (as on price lists).
REUSED_COST = 10

#: So many of the last requests say what is expected of the next one.
MEMORY = 8

#: Beside those that matter, so many may be kept before the others are looked for.
SPARE = 64


class TenantView(NamedTuple):
    """A tenant as others may see it."""

    tenant: str
    share: int
    num_waiting: int  # in line
    num_running: int
    num_tokens: int  # charged since it came, outputs as often as they cost
    counter: int


@dataclass(slots=True)
class _Expectation:
    """The mean of the last numbers, older ones counting less and less; 0 before there is one."""

    total: int = 0  # of as many as it remembers
    is_known: bool = False

    @property
    def value(self) -> int:
        return self.total // MEMORY

    def seen(self, value: int) -> None:
        self.total = self.total + value - self.value if self.is_known else MEMORY * value
        self.is_known = True


@dataclass(slots=True, eq=False)
class _Account:
    tenant: str
    counter: int = 0
    turn: int = 0  # when one of its requests was last placed, in placements of all
    share: int = 1  # of the last request that came
    num_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    output: _Expectation = field(default_factory=_Expectation)

    @property
    def place(self) -> tuple[int, int, str]:
        """Position in line; equal counters go by the longer wait for a turn."""
        return self.counter, self.turn, self.tenant


class TokenCounters:
    """Tells whose turn it is. A tenant is remembered while it has requests or owes more than a new one."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._line: list[_Account] = []  # of those with requests in line, sorted
        self._last: _Account | None = None  # that left the line last
        self._expected: dict[RequestKey, int] = {}  # output tokens that were charged for what runs
        self._output = _Expectation()  # of all tenants: of one that is new
        self._num_placed = 0
        self._num_kept = 0  # tenants, when they were last looked through

    # --- the line ---

    def in_turn(self) -> Iterator[str]:
        """Tenants with requests in line, the next one first."""
        return (account.tenant for account in self._line)

    def joined(self, request: Request) -> None:
        """A request joined the line. With its first a tenant owes as much as the one that is next, or more."""
        account = self._accounts.get(request.tenant)
        if account is None:
            self._forget()
            account = self._accounts[request.tenant] = _Account(request.tenant)
        account.share = request.share
        if not account.num_waiting:
            account.counter = max(account.counter, self._floor)
            insort(self._line, account, key=_place)
        account.num_waiting += 1

    def left(self, request: Request) -> None:
        """A request left the line, whatever becomes of it."""
        account = self._accounts[request.tenant]
        account.num_waiting -= 1
        if not account.num_waiting:
            del self._line[self._index(account)]
            self._last = account

    @property
    def _floor(self) -> int:
        """Return the value that an idle tenant's counter is lifted to."""
        if self._line:
            return self._line[0].counter
        return 0 if self._last is None else self._last.counter

    def before(self, tenant: str, num_units: int) -> Iterator[tuple[str, int]]:
        """Yield tenants with turns before this one, in line or new, is charged so much; and for how many units."""
        account = self._accounts.get(tenant)
        until = max(self._floor, 0 if account is None else account.counter) + num_units
        for other in self._line:
            if other.counter >= until:
                return
            if other is not account:
                yield other.tenant, until - other.counter

    def price(self, tenant: str, num_requests: int, num_priced_tokens: int) -> int:
        """Return about how many units all these requests of a tenant in line would be charged now.

        ``num_priced_tokens`` are `priced_tokens` of their prompts.
        """
        account = self._accounts[tenant]
        output = account.output if account.output.is_known else self._output
        return (num_priced_tokens + OUTPUT_COST * num_requests * output.value) * UNITS // account.share

    # --- charges ---

    def placed(self, request: Request, num_reused_tokens: int = 0) -> None:
        """A request that has left the line got its place, where so much of its prompt is kept."""
        account = self._accounts[request.tenant]
        num_expected = self._expected[request.request_id, request.epoch] = self._num_expected(request)
        account.num_running += 1
        self._num_placed += 1
        num_prompt_tokens = request.num_prompt_tokens
        is_first = request.epoch == 0
        num_saved = num_prompt_tokens - priced_tokens(num_prompt_tokens, num_reused_tokens) if is_first else 0
        self._charge(
            account,
            _units(request, num_expected) - num_saved * UNITS // request.share,
            turn=self._num_placed,
        )
        account.num_tokens += _num_tokens(request, num_expected) - num_saved

    def ended(self, request: Request, num_output_tokens: int | None) -> None:
        """A request is over that drew so many tokens, those of earlier epochs among them; None if nobody knows.

        Nothing changes if it was never placed, and what nobody knows stays as it was expected.
        """
        num_expected = self._expected.pop((request.request_id, request.epoch), None)
        if num_expected is None:
            return
        account = self._accounts[request.tenant]
        account.num_running -= 1
        if num_output_tokens is None:
            return
        num_drawn = max(0, num_output_tokens)
        if num_drawn:
            account.output.seen(num_drawn)
            self._output.seen(num_drawn)
        account.num_tokens += _num_tokens(request, num_drawn) - _num_tokens(request, num_expected)
        self._charge(account, _units(request, num_drawn) - _units(request, num_expected), turn=account.turn)

    def _charge(self, account: _Account, num_units: int, *, turn: int) -> None:
        in_line = account.num_waiting > 0 and len(self._line) > 1
        if in_line:
            del self._line[self._index(account)]
        account.counter += num_units
        account.turn = turn
        if in_line:
            insort(self._line, account, key=_place)

    def _num_expected(self, request: Request) -> int:
        """Output tokens."""
        account = self._accounts[request.tenant]
        output = account.output if account.output.is_known else self._output
        return min(output.value, request.max_tokens)

    # --- bounded memory ---

    def _forget(self) -> None:
        """Forget tenants whose counter is no larger than a new one's, whenever their number may have doubled."""
        if len(self._accounts) < 2 * self._num_kept + SPARE:
            return
        floor = self._floor
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_waiting or account.num_running or account.counter > floor or account is self._last
        }
        self._num_kept = len(self._accounts)

    def _index(self, account: _Account) -> int:
        return bisect_left(self._line, account.place, key=_place)

    @property
    def views(self) -> list[TenantView]:
        """Return a view of every remembered tenant."""
        return [
            TenantView(
                tenant=account.tenant,
                share=account.share,
                num_waiting=account.num_waiting,
                num_running=account.num_running,
                num_tokens=account.num_tokens,
                counter=account.counter,
            )
            for account in self._accounts.values()
        ]

    def check_integrity(self) -> None:
        in_line = sorted((account for account in self._accounts.values() if account.num_waiting), key=_place)
        assert in_line == self._line, "the line is not that of the tenants that wait"
        num_running = sum(account.num_running for account in self._accounts.values())
        assert num_running == len(self._expected), f"{num_running} run, {len(self._expected)} were charged"


def priced_tokens(num_prompt_tokens: int, num_reused_tokens: int) -> int:
    """Return how many tokens a prompt is charged as of which so many are kept."""
    return num_prompt_tokens - num_reused_tokens + num_reused_tokens // REUSED_COST


def _num_tokens(request: Request, num_output_tokens: int) -> int:
    """What a request costs; never nothing. A prompt that is computed again is not its client's doing."""
    num_prompt_tokens = 0 if request.epoch else request.num_prompt_tokens
    return max(1, num_prompt_tokens + OUTPUT_COST * num_output_tokens)


def _units(request: Request, num_output_tokens: int) -> int:
    return _num_tokens(request, num_output_tokens) * UNITS // request.share


def _place(account: _Account) -> tuple[int, int, str]:
    return account.place
