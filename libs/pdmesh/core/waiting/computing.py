"""Requests that now compute a prompt whose first granules a waiting request shares."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.requests.phases import Phase
from pdmesh.core.requests.request import RequestState
from pdmesh.model import PrefixHash, Request, RequestKey


class Computing:
    """Requests in prefill, by the first granule that each of them computes."""

    def __init__(self) -> None:
        self._states: dict[PrefixHash, list[RequestState]] = {}

    def begin(self, state: RequestState) -> None:
        """Add a placed request, unless it computes no whole granule."""
        if (granule := state.first_granule) is not None:
            self._states.setdefault(granule, []).append(state)

    def end(self, state: RequestState) -> None:
        """Remove a request whose prompt is computed or has ended; does nothing the second time."""
        granule = state.first_granule
        states = None if granule is None else self._states.get(granule)
        if granule is not None and states is not None and state in states:
            states.remove(state)
            if not states:
                del self._states[granule]

    def shared_with(self, request: Request) -> list[RequestState]:
        """Return the requests that now compute a granule which the waiting ``request`` has too."""
        if not self._states or not request.prefix:
            return []
        return [state for granule in request.chain if granule in self._states for state in self._states[granule]]

    def check_integrity(self, find: Callable[[RequestKey], RequestState | None]) -> None:
        """Raise AssertionError for a listed request that is not computing its prompt."""
        for granule, states in self._states.items():
            for state in states:
                assert state.first_granule == granule, f"{state.key} computes another granule first"
                assert find(state.key) is state, f"{state.key} is over, and said to compute"
                assert state.phase is Phase.PREFILLING, f"{state.key} is {state.phase}, and said to compute"
