"""What every rank but the leader does: it computes its part of the steps that the leader tells it of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import assert_never

import structlog
import torch

from pdmesh.engine.forward import Forward, StepOutput, step_spans
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.rank_commands import (
    Abandon,
    Answers,
    Command,
    Embed,
    EndStep,
    Go,
    OpenCache,
    Replicas,
    Score,
    StageStep,
    Step,
)
from pdmesh.engine.ranks.rank_elsewhere import AskedRows, asked_by_ranks
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.kv.elsewhere import KvElsewhereLost

log = structlog.get_logger()


class _Abandoned(Exception):
    """The leader computes no more of the step."""


class Follower:
    """Computes steps with the rank's own forward. ``receive`` waits for the next command; None: the leader is gone."""

    def __init__(
        self, forward: Forward, group: RankGroup, receive: Callable[[], Command | None], asked: AskedRows
    ) -> None:
        self._forward = forward
        self._group = group
        self._asked = asked
        self._receive_next = receive
        self._replicas = Replicas()

    @torch.inference_mode()
    def run(self) -> None:
        """Follow until the leader, or another rank, is gone."""
        try:
            while True:
                match self._receive():
                    case Step() as step:
                        self._step(step)
                    case other:
                        raise _unexpected(other)
        except InstanceUnavailable as error:
            log.info("the rank ends", reason=str(error))

    def _receive(self) -> Command:
        command = self._receive_next()
        if command is None:
            raise InstanceUnavailable("the leader is gone")
        return command

    def _step(self, step: Step) -> None:
        batch = self._replicas.batch(step)
        spans = asked_by_ranks(step_spans(batch), self._group, self._asked)
        with (
            suppress(_Abandoned, KvElsewhereLost),
            self._forward.step(batch, spans, self._layer_done if step.hooked else None) as output,
        ):
            self._score(output)

    def _score(self, output: StepOutput) -> None:
        while True:
            match self._receive():
                case Score(rows):
                    output.logits(rows)
                case EndStep():
                    return
                case other:
                    raise _unexpected(other)

    def _layer_done(self, layer: int) -> None:
        del layer
        self._group.meet()
        while True:
            command = self._receive()
            match command:
                case Go():
                    return
                case Step():
                    self._step(command)
                case Abandon():
                    raise _Abandoned
                case Score() | Embed() | EndStep() | OpenCache() | StageStep() | Answers():
                    raise _unexpected(command)
                case _:
                    assert_never(command)


def _unexpected(command: Command) -> ProtocolError:
    return ProtocolError(f"the leader sends {type(command).__name__}, which does not follow what came before")
