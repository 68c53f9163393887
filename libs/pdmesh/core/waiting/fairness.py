"""Fair shares between tenants: a virtual token counter for each (Sheng et al., Fairness in Serving LLMs, OSDI 2024).

Among the tenants with requests in line, the one with the least counter is served next. A request is charged at
placement: its prompt tokens, cached ones at a tenth of the price, plus twice its expected output tokens. The
expectation comes from the tenant's earlier requests. When the request ends, the charge for expected output is replaced
by the charge for actual output. No request is therefore placed without a charge, and in the end each tenant has paid
for its actual use. A counter grows by tokens divided by the share of the tenant's key.

All numbers are integers, so sums do not depend on the order, and a replay gives the same counters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.model import Request, RequestKey

#: Counter units per token, so that integer division by shares stays precise.
UNITS = 1000

#: Price of an output token in prompt tokens (as in the paper, and about as on price lists).
OUTPUT_COST = 2

#: Number of cached prompt tokens that cost as much as one computed token (as on price lists).
REUSED_COST = 10

#: Number of past requests that the expected output length averages over.
MEMORY = 8

#: Number of accounts kept before unneeded ones are first removed.
SPARE = 64


class TenantView(NamedTuple):
    """State of a tenant's counter for reports.

    `num_tokens` is the total charged while the tenant was remembered, with outputs at their price.
    """

    tenant: str
    share: int
    num_waiting: int
    num_running: int
    num_tokens: int
    counter: int


@dataclass(slots=True)
class _Expectation:
    """Moving mean of about the last `MEMORY` values; 0 before the first value."""

    total: int = 0
    is_known: bool = False

    @property
    def value(self) -> int:
        return self.total // MEMORY

    def seen(self, value: int) -> None:
        self.total = self.total + value - self.value if self.is_known else MEMORY * value
        self.is_known = True


@dataclass(slots=True, eq=False)
class _Account:
    """A tenant's counter and the numbers of its requests.

    `turn` is the placement, counted over all tenants, that last placed one of its requests. `share` is the last arrived
    request's.
    """

    tenant: str
    counter: int = 0
    turn: int = 0
    share: int = 1
    num_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    output: _Expectation = field(default_factory=_Expectation)

    @property
    def place(self) -> tuple[int, int, str]:
        """Sort key in the line: the counter, then the longer wait for a turn."""
        return self.counter, self.turn, self.tenant


class TokenCounters:
    """Order of the tenants. A tenant is remembered while it has requests or owes more than a new one."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        # The tenants with requests in line, sorted by `_Account.place`.
        self._line: list[_Account] = []
        # The tenant that last left the line.
        self._last: _Account | None = None
        # The output tokens that each running request was charged for in advance.
        self._expected: dict[RequestKey, int] = {}
        # The outputs of all tenants: the expectation for a new tenant.
        self._output = _Expectation()
        self._num_placed = 0
        # The number of tenants left by the last `_forget`.
        self._num_cached = 0

    # --- the line ---

    def in_turn(self) -> Iterator[str]:
        """Iterate over the tenants with requests in line, the next one first."""
        return (account.tenant for account in self._line)

    def joined(self, request: Request) -> None:
        """Count a request that joined the line. An idle tenant's counter is lifted to the least one in line."""
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
        """Count a request that left the line, for whatever reason."""
        account = self._accounts[request.tenant]
        account.num_waiting -= 1
        if not account.num_waiting:
            del self._line[self._index(account)]
            self._last = account

    @property
    def _floor(self) -> int:
        """Value that an idle tenant's counter is lifted to."""
        if self._line:
            return self._line[0].counter
        return 0 if self._last is None else self._last.counter

    def before(self, tenant: str, num_units: int) -> Iterator[tuple[str, int]]:
        """Yield the other tenants served before ``tenant`` is charged ``num_units``, with the units each gets first."""
        account = self._accounts.get(tenant)
        until = max(self._floor, 0 if account is None else account.counter) + num_units
        for other in self._line:
            if other.counter >= until:
                return
            if other is not account:
                yield other.tenant, until - other.counter

    def price(self, tenant: str, num_requests: int, num_priced_tokens: int) -> int:
        """Estimate the charge, in units, for all of a tenant's requests in line if they were placed now.

        ``num_priced_tokens`` is the sum of `priced_tokens` over their prompts.
        """
        account = self._accounts[tenant]
        output = account.output if account.output.is_known else self._output
        return (num_priced_tokens + OUTPUT_COST * num_requests * output.value) * UNITS // account.share

    # --- charges ---

    def placed(self, request: Request, num_reused_tokens: int = 0) -> None:
        """Charge a placed request's tenant for the prompt and the expected output, divided by the share.

        ``num_reused_tokens`` of the prompt are cached there and cost less. A restarted request pays for output only.
        """
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
        """Replace the charge for expected output by the actual output, if the request was placed.

        ``num_output_tokens`` includes earlier epochs. None means unknown: the expected charge stays.
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
        """Return the number of output tokens to charge in advance."""
        account = self._accounts[request.tenant]
        output = account.output if account.output.is_known else self._output
        return min(output.value, request.max_tokens)

    # --- bounded memory ---

    def _forget(self) -> None:
        """Forget tenants that owe no more than a new one, once their number may have doubled."""
        if len(self._accounts) < 2 * self._num_cached + SPARE:
            return
        floor = self._floor
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_waiting or account.num_running or account.counter > floor or account is self._last
        }
        self._num_cached = len(self._accounts)

    def _index(self, account: _Account) -> int:
        return bisect_left(self._line, account.place, key=_place)

    @property
    def views(self) -> list[TenantView]:
        """View of every remembered tenant."""
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
    """Return the number of tokens that a prompt is charged as, with cached tokens at their lower price."""
    return num_prompt_tokens - num_reused_tokens + num_reused_tokens // REUSED_COST


def _num_tokens(request: Request, num_output_tokens: int) -> int:
    """Return a request's charge in tokens, at least 1. Only the first epoch pays for the prompt."""
    num_prompt_tokens = 0 if request.epoch else request.num_prompt_tokens
    return max(1, num_prompt_tokens + OUTPUT_COST * num_output_tokens)


def _units(request: Request, num_output_tokens: int) -> int:
    return _num_tokens(request, num_output_tokens) * UNITS // request.share


def _place(account: _Account) -> tuple[int, int, str]:
    return account.place
