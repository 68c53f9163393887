"""Commands and events know themselves: to whom they go, and who handles them."""

from __future__ import annotations

from typing import get_args

import pytest

from pdmesh.core.commands import GatewayCommand, Hold, InstanceCommand, ToGateway, ToInstance, ToInstanceOfRequest
from pdmesh.core.events import Event, InstanceEvent, RequestReport, Tick
from pdmesh.core.handlers import Handlers


def leaves(kind: type) -> set[str]:
    """The classes below one that have none below them. By name: one with slots was made twice."""
    below: list[type] = kind.__subclasses__()
    return {leaf for each in below for leaf in leaves(each)} if below else {kind.__name__}


def names(union: object) -> set[str]:
    return {kind.__name__ for kind in get_args(union)}


def test_the_lists_of_commands_and_events_have_all_that_there_are() -> None:
    assert names(InstanceCommand) == leaves(ToInstance)
    assert names(GatewayCommand) == leaves(ToGateway)
    assert leaves(RequestReport) <= names(InstanceEvent) <= names(Event)


def test_what_names_a_request_is_of_its_life() -> None:
    named = {kind.__name__ for kind in get_args(InstanceCommand) if "request_id" in kind.__struct_fields__}
    assert named == leaves(ToInstanceOfRequest)


def test_each_kind_has_one_handler_and_what_has_none_is_named() -> None:
    handlers, seen = Handlers(), list[tuple[Tick, float | None]]()
    handlers.on_timed(Tick, lambda event, now_s: seen.append((event, now_s)))
    with pytest.raises(TypeError, match="Tick is handled twice"):
        handlers.on(Tick, lambda event: seen.append((event, None)))
    handlers.check([Tick])
    with pytest.raises(TypeError, match="Hold: every kind of event has one handler"):
        handlers.check([Tick, Hold])
    with pytest.raises(TypeError, match="Tick: "):
        handlers.check([])
    handlers.handle(Tick(), 2.0)
    assert seen == [(Tick(), 2.0)]
