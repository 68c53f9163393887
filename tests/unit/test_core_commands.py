"""What commands and the records in them are as Structs: who loses a keyword of theirs changes the wire."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, Hold, SendCopy, WakeAt
from pdmesh.plans import ChunkDone, ChunkPlan, Evictions, KvShard, PrefillGroup, ResidentContext, StepPlan, TransferPlan

#: They have fields of what is reused, and are as they were where nothing is.
OMIT_DEFAULTS = (AdmitPrefill, ExpectCopy, SendCopy, Hold, TransferPlan, Evictions)

RECORDS = (ChunkDone, ChunkPlan, Evictions, KvShard, PrefillGroup, ResidentContext, StepPlan, TransferPlan)


@pytest.mark.parametrize("struct", [*get_args(Command), *RECORDS], ids=lambda struct: struct.__name__)
def test_commands_and_their_records_are_frozen_structs_by_keyword(struct: type[msgspec.Struct]) -> None:
    config = struct.__struct_config__
    assert config.frozen
    assert config.eq
    assert (config.tag, config.tag_field, config.array_like, config.forbid_unknown_fields) == (None, None, False, False)
    assert config.omit_defaults == (struct in OMIT_DEFAULTS)
    assert all(msgspec.inspect.is_struct_type(each) for each in struct.__mro__[:-2])
    with pytest.raises(TypeError, match="positional"):
        struct(*(None for _ in struct.__struct_fields__))


def test_a_frozen_command_is_hashable_and_cannot_be_changed() -> None:
    command = WakeAt(at_s=1.0)
    assert hash(command) == hash(WakeAt(at_s=1.0))
    with pytest.raises(AttributeError):
        command.at_s = 2.0  # type: ignore[misc]
