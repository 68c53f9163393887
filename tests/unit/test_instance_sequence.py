"""The state machine of a sequence on an instance: its tables are whole, and no other module goes around it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pdmesh.instance.sequence as sequences
import pdmesh_lab.sim.instance as simulated
import pdmesh_testing.modelled as modelled
from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import LeavingCopy
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence import PromptWork, Sequence
from pdmesh.instance.sequence_phases import (
    COPY_TRANSITIONS,
    FACTS,
    TRANSITIONS,
    IllegalStep,
    LeavingState,
    SeqPhase,
)
from pdmesh.model import Epoch, RequestId, Then
from pdmesh_testing.worker import a_shard, a_transfer

INSTANCE = Path(sequences.__file__).parent
FOLDERS = (INSTANCE, INSTANCE.parent / "worker", Path(simulated.__file__).parent, Path(modelled.__file__).parent)
KEY = (RequestId("r"), Epoch(0))
SOURCE, TARGET = a_shard("p", 1), a_shard("d", 1)


def a_sequence(phase: SeqPhase = SeqPhase.PREFILLING) -> Sequence:
    return Sequence(KEY, phase, 4, prefix=CachedPrefix(), length=Length(9, 1, 9))


def test_a_prompt_that_is_handed_over_goes_through_its_phases() -> None:
    source, phases = a_sequence(), list[tuple[SeqPhase, LeavingState | None]]()

    def note() -> None:
        source.check_integrity()
        phases.append((source.phase, None if source.onward is None else source.onward.state))

    source.send_on(None, Then.DECODE)
    note()
    assert source.onward is not None
    source.onward.offer()
    source.compute(8)
    source.onward.grant(a_transfer(SOURCE, TARGET))
    note()
    source.end_prompt()
    source.onward.lose_receiver()
    note()
    source.keep()
    source.decode()
    note()
    source.begin_move(a_transfer(SOURCE, TARGET)).freeze()
    source.pause(12)
    note()
    source.end_move()
    source.decode()
    note()
    assert phases == [
        (SeqPhase.PREFILLING, LeavingState.WAITING),
        (SeqPhase.PREFILLING, LeavingState.SENDING),
        (SeqPhase.COMPUTED, LeavingState.OFFERED),
        (SeqPhase.DECODING, None),
        (SeqPhase.PAUSED, None),
        (SeqPhase.DECODING, None),
    ]
    assert source.num_tokens == 12


def test_kv_that_comes_decodes_or_answers_for_its_range() -> None:
    transfer = a_transfer(SOURCE, TARGET)
    whole = Sequence(KEY, SeqPhase.EXPECTED, 4, prefix=CachedPrefix(), incoming=transfer)
    whole.check_integrity()
    whole.land(8, Length(9, 1, 9))
    whole.decode()
    whole.check_integrity()
    part = Sequence(KEY, SeqPhase.EXPECTED, 4, prefix=CachedPrefix(), incoming=transfer, part=0)
    part.land_range(4)
    part.check_integrity()
    assert (whole.phase, part.phase) == (SeqPhase.DECODING, SeqPhase.HOLDING)


def test_an_illegal_transition_names_itself_and_both_phases() -> None:
    with pytest.raises(IllegalStep, match=r"'r', 0.*decode from prefilling to decoding"):
        a_sequence().decode()
    with pytest.raises(IllegalStep, match="commit of a copy from sending to committed"):
        LeavingCopy(a_transfer(SOURCE, TARGET), LeavingState.SENDING).commit()


def test_a_freed_sequence_sends_nothing_and_may_be_freed_again() -> None:
    sequence = a_sequence()
    sequence.send_on(None, Then.DECODE)
    sequence.free()
    sequence.free()
    assert (sequence.phase, sequence.outgoing) == (SeqPhase.FREED, {})
    with pytest.raises(IllegalStep):
        sequence.compute(4)


def test_the_integrity_check_names_a_fact_that_the_phase_does_not_allow() -> None:
    with pytest.raises(AssertionError, match="is computed, and sends is False"):
        a_sequence(SeqPhase.COMPUTED).check_integrity()
    with pytest.raises(AssertionError, match="pauses without a reason"):
        a_sequence(SeqPhase.PAUSED).check_integrity()


def transitions_of(module: str, kind: str) -> set[object]:
    """Return the names that a class gives `_go`."""
    (node,) = [
        each
        for each in ast.walk(ast.parse((INSTANCE / module).read_text()))
        if isinstance(each, ast.ClassDef) and each.name == kind
    ]
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    goes = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "_go"]
    return {call.args[0].value for call in goes if isinstance(call.args[0], ast.Constant)}


def test_the_tables_have_every_phase_and_every_transition() -> None:
    assert transitions_of("sequence.py", "Sequence") == TRANSITIONS.keys()
    assert transitions_of("copy_state.py", "LeavingCopy") == COPY_TRANSITIONS.keys()
    assert FACTS.keys() == set(SeqPhase)
    assert all(hasattr(Sequence, name) for name in TRANSITIONS), "a transition is the method of its name"
    assert all(hasattr(LeavingCopy, name) for name in COPY_TRANSITIONS), "a transition is the method of its name"


def test_only_their_own_modules_assign_the_fields_of_a_sequence() -> None:
    """Neither the machine nor one of its owners does."""
    own = {name for kind in (Sequence, PromptWork, LeavingCopy) for name in kind.__slots__}
    in_place, change = ("given_up", "outgoing"), ("add", "update", "pop", "clear")
    found: set[str] = set()
    for path in [path for folder in FOLDERS for path in folder.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in own:
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    found.add(f"{path.parent.name}/{path.name}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in change:
                called_on = node.func.value
                if isinstance(called_on, ast.Attribute) and called_on.attr in in_place:
                    found.add(f"{path.parent.name}/{path.name}")
    assert found - {"instance/residents.py"} == {"instance/sequence.py"}, "a resident is a record of its own"
