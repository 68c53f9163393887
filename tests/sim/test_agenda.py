from __future__ import annotations

import pytest

from pdmesh_lab.sim.agenda import Agenda


def test_what_is_due_at_once_happens_in_the_order_it_was_noted() -> None:
    agenda, happened = Agenda(), list[tuple[str, float]]()

    def note(name: str, at_s: float) -> None:
        agenda.at(at_s, lambda: happened.append((name, agenda.now_s)))

    note("late", 2.0)
    note("first", 1.0)
    note("second", 1.0)
    agenda.at(1.0, lambda: note("third", 1.0))
    while agenda.advance():
        pass
    assert happened == [("first", 1.0), ("second", 1.0), ("third", 1.0), ("late", 2.0)]


def test_what_is_cancelled_does_not_move_the_clock() -> None:
    agenda = Agenda()
    agenda.at(1.0, lambda: pytest.fail("cancelled")).cancel()
    assert not agenda.advance()
    assert agenda.now_s == 0.0


def test_nothing_is_noted_for_the_past() -> None:
    agenda = Agenda()
    agenda.at(1.0, lambda: None)
    agenda.advance()
    with pytest.raises(AssertionError, match="over"):
        agenda.at(0.5, lambda: None)


def test_the_next_appointment_is_one_that_will_be_kept() -> None:
    agenda = Agenda()
    cancelled = agenda.at(1.0, lambda: pytest.fail("cancelled"))
    agenda.at(2.0, lambda: None)
    assert agenda.next_s == 1.0
    cancelled.cancel()
    assert agenda.next_s == 2.0
    agenda.advance()
    assert agenda.next_s is None
