"""The leader of an instance of several stages. A step enters as soon as the one before leaves the first stage.

The leader computes no layer. It sends steps to the stages, receives their reports of layers whose KV is written, and
draws tokens from the last stage's scores. Each of several threads may have a step in the stages; another thread
receives the reports.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.base import EngineSequence, LayerHook, SequenceSlice, StepFlight
from pdmesh.engine.forward import Rows, StepOutput, drawn_rows
from pdmesh.engine.ranks.channel import StageChannel
from pdmesh.engine.ranks.rank_commands import (
    Abandon,
    Answers,
    Awaiting,
    Begun,
    Command,
    Deltas,
    Embed,
    EndStep,
    Go,
    Left,
    Matrix,
    Question,
    Ready,
    Report,
    Score,
    StageStep,
    Written,
)
from pdmesh.engine.ranks.rank_elsewhere import AskedRows
from pdmesh.engine.sampler import sample
from pdmesh.errors import InstanceUnavailable
from pdmesh.kv.remote_kv import RangeQuestion, RemoteKv, RemoteKvLost


class Stages(Protocol):
    """The ranks of an instance of several stages, as the leader's engine sees them.

    Calls raise InstanceUnavailable if one is gone.
    """

    @property
    def num_stages(self) -> int: ...

    @property
    def matrices(self) -> StageChannel:
        """The leader's end of the last stage's channel."""
        ...

    def tell(self, command: Command, stage: int | None = None) -> None:
        """Send a command to each rank of a stage, or of all stages. Safe on any thread."""
        ...

    def reports(self) -> Iterator[tuple[int, Report]]:
        """Yield the stages' reports with the stage's number, as they arrive, without end.

        Raise InstanceUnavailable once a stage is gone.
        """
        ...

    def open_cache(self, num_bytes: int, num_blocks: int, num_frames: int | None) -> Tensor:
        """Return the bytes of the KV cache, zeros that all ranks share, and have each rank map it."""
        ...

    def ready(self) -> Ready:
        """Wait until all ranks can compute, and return their common properties.

        Raise ConfigError if one cannot, or ranks differ in their arithmetic or weights.
        """
        ...


class _News(NamedTuple):
    stage: int
    report: Report
    matrix: Tensor | None = None


class _Asked:
    """Questions of the stages about one sequence's KV on other instances."""

    def __init__(self, elsewhere: RemoteKv, asked: AskedRows) -> None:
        self._elsewhere = elsewhere
        self._asked = asked
        self._num_rows = 0

    def ask(self, question: RangeQuestion) -> None:
        self._num_rows = len(self._asked.query_rows(question.query))
        self._elsewhere.ask(question)

    def answers(self) -> Answers:
        """Return the answers for the stage's ranks. Raise RemoteKvLost if other instances do not answer."""
        rows = self._asked.answer_rows(self._elsewhere.answers(), self._num_rows, self._elsewhere)
        return Answers(rows.numpy().tobytes())


class _UnderWay:
    """A step in the stages, as the thread that waits for it sees it."""

    def __init__(
        self, stages: Stages, number: int, scored: tuple[int, ...], asked: Mapping[int, _Asked], *, stays: bool
    ) -> None:
        """``asked`` is by the sequences' places in the step. ``stays``: the last stage keeps the step."""
        self.number = number
        self._asked = asked
        self.scored = scored
        self.scores: Tensor | None = None
        self.stays = stays
        self.news: SimpleQueue[_News | InstanceUnavailable] = SimpleQueue()
        self._stages = stages

    def follow(self, on_layer: LayerHook | None, flight: StepFlight) -> None:
        """Wait until all stages have computed the step. Call the layer hook, and answer the stages' questions.

        Afterwards, raise the layer hook's exception if there was one, or RemoteKvLost if other instances did not
        answer.
        """
        began_s = time.perf_counter()
        busy_s = held_s = 0.0
        num_left, awaits_scores = 0, bool(self.scored)
        failure: BaseException | None = None
        while num_left < self._stages.num_stages or (awaits_scores and self.scores is None):
            stage, report, matrix = self._next()
            match report:
                case Begun():
                    flight.on_begin()
                case Question(place=place, asked=asked):
                    self._asked[place].ask(asked)
                case Awaiting(place=place):
                    try:
                        self._stages.tell(self._asked[place].answers(), stage)
                    except RemoteKvLost as error:
                        failure, awaits_scores = failure or error, False
                        self._stages.tell(Abandon(), stage)
                case Written(layer=layer):
                    hook_began_s = time.perf_counter()
                    try:
                        if on_layer is not None and failure is None:
                            on_layer(layer)
                    except BaseException as error:  # raised when the stages have left the step
                        failure = error
                    if flight.waits:
                        awaits_scores = awaits_scores and failure is None
                        held_s += time.perf_counter() - hook_began_s
                        self._stages.tell(Go() if failure is None else Abandon(), stage)
                case Left():
                    num_left += 1
                    busy_s += report.busy_s
                case Matrix():
                    self.scores = matrix
                case _:
                    assert_never(report)
        flight.queued_s += max(0.0, time.perf_counter() - began_s - busy_s - held_s)
        if failure is not None:
            raise failure

    def ask(self, command: Score | Embed) -> Tensor:
        """Return the rows that the last stage computes of a step that stays there."""
        self._stages.tell(command, self._stages.num_stages - 1)
        _, _, matrix = self._next()
        assert matrix is not None
        return matrix

    def end(self) -> None:
        """Release the last stage if the step stays there."""
        if self.stays:
            self._stages.tell(EndStep(), self._stages.num_stages - 1)

    def _next(self) -> _News:
        news = self.news.get()
        if isinstance(news, InstanceUnavailable):
            self.news.put(news)  # the next call must fail, too
            raise InstanceUnavailable(str(news))
        return news


class Pipeline:
    """Forward passes by stages. Steps of several threads enter in the order of the calls."""

    def __init__(self, stages: Stages, asked: AskedRows, *, block_size: int) -> None:
        self._stages = stages
        self._asked = asked
        self._block_size = block_size
        self._deltas = Deltas()
        self._entry = threading.Lock()
        self._num_entered = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._lost: InstanceUnavailable | None = None
        threading.Thread(target=self._hear, name="stages", daemon=True).start()

    @property
    def num_stages(self) -> int:
        return self._stages.num_stages

    @contextlib.contextmanager
    def step(
        self,
        batch: Sequence[SequenceSlice],
        spans: Sequence[QuerySpan],
        on_layer: LayerHook | None,
        flight: StepFlight | None,
    ) -> Iterator[StepOutput]:
        """Enter a step, and begin the block when all layers are computed."""
        flight = flight or StepFlight()
        step = self._enter(batch, spans, flight, hooked=on_layer is not None)
        try:
            step.follow(on_layer, flight)
            try:
                yield _PipelineOutput(step)
            finally:
                step.end()
        finally:
            del self._under_way[step.number]

    def settle(self) -> None:
        """Return at once: layers are computed before their hooks are called."""

    def _enter(
        self, batch: Sequence[SequenceSlice], spans: Sequence[QuerySpan], flight: StepFlight, *, hooked: bool
    ) -> _UnderWay:
        scored = tuple(drawn_rows(batch, spans))
        asked = {
            place: _Asked(span.elsewhere, self._asked) for place, span in enumerate(spans) if span.elsewhere is not None
        }
        stays = any(part.prompt_logprobs or (part.sample and part.sequence.params.embeds) for part in batch)
        with self._entry:
            number = self._num_entered
            self._num_entered += 1
            step = self._under_way[number] = _UnderWay(self._stages, number, scored, asked, stays=stays)
            try:
                if self._lost is not None:
                    raise InstanceUnavailable(str(self._lost))
                delta = self._deltas.step(batch, self._block_size, hooked=hooked)
                self._stages.tell(StageStep(number, delta, flight.waits, scored, stays))
            except BaseException:
                del self._under_way[number]
                raise
        return step

    def _hear(self) -> None:
        """Pass the stages' reports to the threads that wait for them, until a stage is gone."""
        try:
            for stage, report in self._stages.reports():
                matrix = None
                if isinstance(report, Matrix):
                    matrix = self._stages.matrices.receive(report.num_rows, report.num_columns, torch.float32)
                if (step := self._under_way.get(report.number)) is not None:
                    step.news.put(_News(stage, report, matrix))
        except InstanceUnavailable as error:
            self._lost = error
            for step in list(self._under_way.values()):
                step.news.put(error)


class _PipelineOutput:
    """`StepOutput` of a step that has passed all stages."""

    def __init__(self, step: _UnderWay) -> None:
        self._step = step

    def logits(self, rows: Rows) -> Tensor:
        asked = tuple(rows)
        if asked == self._step.scored and self._step.scores is not None:
            return self._step.scores
        return self._step.ask(Score(asked))

    def embeddings(self, rows: Rows) -> Tensor:
        return self._step.ask(Embed(tuple(rows)))

    def draw(self, rows: Rows, sequences: Sequence[EngineSequence]) -> list[int]:
        return sample(self.logits(rows), sequences)
