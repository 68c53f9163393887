"""The ranks other than the leader: each computes its part of the steps that the leader sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import structlog
import torch

from pdmesh.engine.forward import Forward, StepOutput, step_spans
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.rank_commands import Abandon, Command, EndStep, Go, Replicas, Score, Step
from pdmesh.engine.ranks.rank_elsewhere import AskedRows, ElsewhereOfRanks
from pdmesh.errors import InstanceUnavailable, ProtocolError
from pdmesh.kv.remote_kv import RemoteKvLost

log = structlog.get_logger()


class Abandoned(Exception):
    """The leader has abandoned the step."""


class RankFollower(ABC):
    """A rank that executes commands. ``receive`` waits for the leader's next one, None if the leader is gone."""

    def __init__(self, group: RankGroup, receive: Callable[[], Command | None], asked: AskedRows) -> None:
        self._group = group
        self._receive_next = receive
        self._asked = asked
        self._replicas = Replicas()

    @torch.inference_mode()
    def run(self) -> None:
        """Execute commands until the leader or another rank is gone. Log the reason."""
        try:
            while True:
                self._follow()
        except InstanceUnavailable as error:
            log.info("rank stopping", reason=str(error))

    @abstractmethod
    def _follow(self) -> None:
        """Compute the next step."""

    def _receive(self) -> Command:
        command = self._receive_next()
        if command is None:
            raise InstanceUnavailable("the instance's leader ended")
        return command


class Follower(RankFollower):
    """A rank that computes its part of the leader's steps with its own forward."""

    def __init__(
        self, forward: Forward, group: RankGroup, receive: Callable[[], Command | None], asked: AskedRows
    ) -> None:
        super().__init__(group, receive, asked)
        self._forward = forward

    def _follow(self) -> None:
        match self._receive():
            case Step() as step:
                self._step(step)
            case other:
                raise unexpected(other)

    def _step(self, step: Step) -> None:
        batch = self._replicas.batch(step, lambda _, num_tokens: ElsewhereOfRanks(num_tokens, self._group, self._asked))
        spans = step_spans(batch)
        with (
            suppress(Abandoned, RemoteKvLost),
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
                    raise unexpected(other)

    def _layer_done(self, layer: int) -> None:
        del layer
        self._group.meet()
        while True:
            match self._receive():
                case Go():
                    return
                case Step() as step:
                    self._step(step)
                case Abandon():
                    raise Abandoned
                case other:
                    raise unexpected(other)


def unexpected(command: Command) -> ProtocolError:
    """Return the error for a command at the wrong time."""
    return ProtocolError(f"the leader sent {type(command).__name__} out of order")
