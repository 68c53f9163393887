"""The ranks of an instance of several stages: each computes the layers of its stage, one step after the other.

A step comes from the leader, and the state after earlier layers from the stage before. While a stage waits for the
leader's command about a step, later steps that arrive are queued.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from torch import Tensor

from pdmesh.engine.base import LayerHook, SequenceSlice
from pdmesh.engine.forward import DirectForward, HiddenOutput, StepOutput, step_spans
from pdmesh.engine.ranks.channel import StageChannel
from pdmesh.engine.ranks.following import Abandoned, RankFollower, unexpected
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.rank_commands import (
    Abandon,
    Answers,
    Awaiting,
    Begun,
    Command,
    Embed,
    EndStep,
    Go,
    Left,
    Matrix,
    Question,
    Report,
    Score,
    StageStep,
    Written,
)
from pdmesh.engine.ranks.rank_elsewhere import AskedRows, ElsewhereOfStage
from pdmesh.engine.transformer_model import Carried, Transformer
from pdmesh.errors import InstanceUnavailable
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKvLost


class StageFollower(RankFollower):
    """A rank that computes its part of a stage.

    ``inlet`` receives the state of the stage before, and is None in the first stage. ``outlet`` leads to the next
    stage, or from the last stage's first rank to the leader; the last stage's other ranks have None. The first rank of
    a stage reports to the leader.

    ``_waited_s`` is the step's time spent waiting for the leader.
    """

    def __init__(
        self,
        forward: DirectForward,
        group: RankGroup,
        receive: Callable[[], Command | None],
        report: Callable[[Report], object],
        inlet: StageChannel | None,
        outlet: StageChannel | None,
        asked: AskedRows,
        *,
        hidden_size: int,
    ) -> None:
        assert isinstance(forward.decoder, Transformer), "what transformers' modules compute has one stage"
        super().__init__(group, receive, asked)
        self._forward = forward
        self._transformer = forward.decoder
        self._share = group.share
        self._report = report
        self._inlet = inlet
        self._outlet = outlet
        self._hidden_size = hidden_size
        self._next: deque[StageStep] = deque()
        self._waited_s = 0.0

    def _follow(self) -> None:
        self._compute(self._next.popleft() if self._next else self._next_step())

    def _next_step(self) -> StageStep:
        command = self._receive()
        if not isinstance(command, StageStep):
            raise unexpected(command)
        return command

    def _word(self) -> Command:
        """Wait for the leader's command about the current step. Queue steps that arrive before."""
        while isinstance(command := self._receive(), StageStep):
            self._next.append(command)
        return command

    def _tell(self, report: Report) -> None:
        if self._share.rank != 0:
            return
        try:
            self._report(report)
        except OSError as error:
            raise InstanceUnavailable("the instance's leader ended") from error

    def _compute(self, command: StageStep) -> None:
        batch = self._replicas.batch(command.step, partial(self._elsewhere, command.number))
        num_rows = sum(part.num_tokens for part in batch)
        before = None if self._inlet is None else self._carried(self._inlet, num_rows)
        if self._inlet is not None and before is None:
            self._pass_on(None)
            self._tell(Left(command.number, 0.0))
            return
        if self._inlet is None:
            self._tell(Begun(command.number))
        began_s, self._waited_s = time.perf_counter(), 0.0
        carried: Carried | None = None
        with suppress(Abandoned, RemoteKvLost):
            carried = self._through(batch, before, self._hook(command))
        busy_s = time.perf_counter() - began_s - self._waited_s
        if not self._share.is_last or carried is None:
            self._pass_on(carried)
            self._tell(Left(command.number, busy_s))
            return
        hidden, delta = carried
        self._score(command, HiddenOutput(self._transformer, hidden if delta is None else hidden + delta), busy_s)

    def _through(self, batch: Sequence[SequenceSlice], before: Carried | None, on_layer: LayerHook | None) -> Carried:
        """Compute the layers here from the state of the layers before. None means that the step's tokens enter here."""
        forward, transformer = self._forward, self._transformer
        inputs, plan = forward.planned(batch, step_spans(batch))
        if before is None:
            before = Carried(transformer.embed_tokens(inputs), None)
        return transformer.through(before, inputs, forward.caches, plan, on_layer)

    def _elsewhere(self, number: int, place: int, num_tokens: int) -> ElsewhereOfStage:
        """Return the KV on other instances of slice ``place`` of step ``number``, which is asked through the leader."""

        def ask(question: RangeQuestion) -> None:
            layer = self._transformer.first_layer + question.layer
            self._tell(Question(number, place, question._replace(layer=layer)))

        def answer() -> bytes | None:
            self._tell(Awaiting(number, place))
            match self._word():
                case Answers(rows):
                    return rows
                case Abandon():
                    return None
                case other:
                    raise unexpected(other)

        return ElsewhereOfStage(num_tokens, self._group, self._asked, ask=ask, answer=answer)

    def _carried(self, inlet: StageChannel, num_rows: int) -> Carried | None:
        dtype = self._transformer.hidden_dtype
        hidden = inlet.receive(num_rows, self._hidden_size, dtype)
        delta = None if hidden is None else inlet.receive(num_rows, self._hidden_size, dtype)
        return None if hidden is None else Carried(hidden, delta)

    def _pass_on(self, carried: Carried | None) -> None:
        if self._share.is_last or self._outlet is None:
            return
        if carried is None:
            self._outlet.send_nothing()
            return
        hidden, delta = carried
        assert delta is not None, "a stage has a layer"
        self._outlet.send(hidden)
        self._outlet.send(delta)

    def _hook(self, command: StageStep) -> LayerHook | None:
        if not command.step.hooked:
            return None

        def layer_done(layer: int) -> None:
            if self._share.num_ranks > 1:
                self._group.meet()
            self._tell(Written(command.number, layer))
            if not command.waits:
                return
            began_s = time.perf_counter()
            word = self._word()
            self._waited_s += time.perf_counter() - began_s
            if isinstance(word, Abandon):
                raise Abandoned
            if not isinstance(word, Go):
                raise unexpected(word)

        return layer_done

    def _score(self, command: StageStep, output: StepOutput, busy_s: float) -> None:
        """Compute the requested scores and embeddings of a step after the model's last layer."""
        began_s = time.perf_counter()
        scores = output.logits(command.scored) if command.scored else None
        self._tell(Left(command.number, busy_s + time.perf_counter() - began_s))
        if scores is not None:
            self._give(command.number, scores)
        while command.stays:
            match self._word():
                case Score(rows):
                    self._give(command.number, output.logits(rows))
                case Embed(rows):
                    self._give(command.number, output.embeddings(rows))
                case EndStep():
                    return
                case other:
                    raise unexpected(other)

    def _give(self, number: int, matrix: Tensor) -> None:
        if self._outlet is not None:
            self._tell(Matrix(number, *matrix.shape))
            self._outlet.send(matrix)
