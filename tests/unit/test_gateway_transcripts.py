"""A token is delivered if its epoch is current and its index is the next one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import RequestRejected
from pdmesh.model import Epoch, FinishReason, GatewayId, InstanceId, RequestId, SamplingParams
from pdmesh.prefixes import PrefixHasher
from pdmesh.wire.messages import (
    PromptLogprobs,
    StreamHandover,
    TokenLogprobs,
    TokenOut,
    pack_token_ids,
    unpack_token_ids,
)
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.prompt_prefixes import PromptPrefix
from pdmesh_gateway.request_transcript import (
    BREAK_GRACE_S,
    MAX_AHEAD,
    MAX_BLAME,
    MAX_SOURCES_AHEAD,
    SILENCE_GRACE_S,
    STALL_GRACE_S,
    Transcript,
)
from pdmesh_gateway.transcripts import Transcripts

pytestmark = pytest.mark.anyio

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def transcript(prompt: list[int] | None = None, *, prompt_logprobs: int | None = None) -> Transcript:
    return Transcript(
        request_id=RequestId("r"),
        gateway_id=GatewayId("g"),
        token_address="127.0.0.1:1",
        prompt=pack_token_ids(prompt or [1, 2, 3]),
        params=SamplingParams(max_tokens=100, prompt_logprobs=prompt_logprobs),
        mailbox=Mailbox(),
        clock=lambda: 5.0,
    )


def token(
    index: int,
    *,
    epoch: int = 0,
    finish: FinishReason | None = None,
    next_: InstanceId | None = None,
    token_id: int | None = None,
) -> TokenOut:
    return TokenOut(
        request_id=RequestId("r"),
        epoch=Epoch(epoch),
        index=index,
        token_id=100 + index if token_id is None else token_id,
        finish_reason=finish,
        next_instance_id=next_,
    )


async def test_tokens_are_delivered_in_order_and_once() -> None:
    t = transcript()
    for index in (0, 1, 1, 0, 2):
        t.offer(token(index), A)
    assert [out.index for out in t.take()] == [0, 1, 2]
    assert list(t.output) == [100, 101, 102]
    assert t.num_dropped == 2
    assert t.resume_at_s is None


async def test_a_late_epoch_is_dropped() -> None:
    t = transcript()
    t.offer(token(0), A)
    assert t.restart(blame=1.0)
    t.offer(token(1, epoch=0), A)
    assert [out.index for out in t.take()] == [0]
    t.offer(token(1, epoch=1), A)
    assert [out.index for out in t.take()] == [1]


async def test_a_gap_is_known_until_it_closes() -> None:
    t = transcript()
    t.offer(token(1), A)
    assert t.take() == []
    assert t.resume_at_s == 5.0 + STALL_GRACE_S
    assert t.mailbox.take() is t  # its consumer watches the clock from now on
    t.offer(token(0), A)
    assert [out.index for out in t.take()] == [0, 1]
    assert t.resume_at_s is None


async def test_a_resumed_request_goes_on_from_what_was_delivered() -> None:
    t = transcript([7, 8])
    t.offer(token(0), A)
    t.offer(token(2), A)  # lost: index 1
    assert t.restart(blame=1.0)
    generation = t.generation()
    assert generation.epoch == 1
    assert list(unpack_token_ids(generation.token_ids)) == [7, 8, 100]
    assert generation.num_prompt_tokens == 2
    assert generation.max_tokens_left == 99
    t.offer(token(1, epoch=1), A)
    t.offer(token(2, epoch=1, finish=FinishReason.LENGTH), A)
    assert [out.index for out in t.take()] == [0, 1, 2]
    assert t.finished


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=60),
    restarts=st.sets(st.integers(0, 59), max_size=2),
)
async def test_whatever_arrives_the_transcript_has_no_gap_and_no_double(
    arrivals: list[tuple[int, int]], restarts: set[int]
) -> None:
    t = transcript()
    taken: list[int] = []
    for i, (epoch, index) in enumerate(arrivals):
        if i in restarts:
            assert t.restart(blame=1.0)
        t.offer(token(index, epoch=epoch), A)
        taken += [out.index for out in t.take()]
    assert taken == list(range(len(taken)))
    assert list(t.output) == [100 + index for index in taken]


async def test_what_waits_for_a_gap_is_bounded() -> None:
    t = transcript()
    for index in range(1, 10 * MAX_AHEAD):
        t.offer(token(index), A)
    assert len(t._ahead[A]) == MAX_AHEAD
    for source in range(100):
        t.offer(token(1), InstanceId(f"stranger-{source}"))
    assert len(t._ahead) == MAX_SOURCES_AHEAD


def num_restarts(t: Transcript, blame: float) -> int:
    """Restart it until that was too often."""
    number = 0
    while t.restart(blame=blame):
        number += 1
    return number


@pytest.mark.parametrize("blame", [1.0, 0.5, 0.25])
async def test_what_it_may_have_caused_is_bounded(blame: float) -> None:
    assert num_restarts(transcript(), blame) == MAX_BLAME / blame


async def test_what_it_cannot_have_caused_says_nothing_of_the_rest() -> None:
    t = transcript()
    assert all(t.restart(blame=blame) for blame in (1.0, 0.0, 0.0, 1.0, 0.0))
    assert num_restarts(t, 1.0) == MAX_BLAME - 2


async def test_progress_renews_what_a_request_may_be_restarted() -> None:
    t = transcript()
    for epoch in range(15):
        t.offer(token(2 * epoch, epoch=epoch), A)
        t.offer(token(2 * epoch + 1, epoch=epoch), A)
        assert t.restart(blame=1.0)
    assert t.num_restarts == 15


async def test_the_token_that_its_prompt_gives_is_no_progress_where_decoding_it_fails() -> None:
    t = transcript()
    for epoch in range(3):
        t.offer(token(epoch, epoch=epoch), A)
        assert t.restart(blame=1.0)
    t.offer(token(3, epoch=3), A)
    assert not t.restart(blame=1.0)


async def test_what_is_not_its_fault_is_not_counted() -> None:
    t = transcript()
    assert all(t.restart(blame=0.0) for _ in range(15))
    assert num_restarts(t, 1.0) == MAX_BLAME


async def test_a_broken_stream_makes_its_requests_suspect() -> None:
    transcripts = Transcripts()
    t = transcript()
    transcripts.add(t)
    transcripts.deliver([token(0)], A)
    transcripts.source_lost(InstanceId("b"))
    assert t.resume_at_s is None
    transcripts.source_lost(A)
    assert t.resume_at_s == 5.0 + BREAK_GRACE_S
    transcripts.deliver([token(1)], A)  # it was only slow
    assert t.resume_at_s is None
    transcripts.source_lost(A, was_silent=True)
    assert t.resume_at_s == 5.0 + SILENCE_GRACE_S


async def test_an_instance_was_unreachable_if_it_had_no_stream_at_any_time_since_the_request_was_submitted() -> None:
    transcripts, t = Transcripts(), transcript()
    transcripts.add(t)

    def submit(source: InstanceId | None) -> None:
        t.source, t.submitted_at_change = source, transcripts.num_changes

    submit(None)
    assert not transcripts.was_unreachable(t), "nobody knows whose token is missing"
    submit(A)
    assert transcripts.was_unreachable(t), "it has never come"
    transcripts.source_opened(A, "")
    transcripts.source_opened(A, "")
    transcripts.source_lost(A)
    assert not transcripts.was_unreachable(t), "one of two streams is left"
    transcripts.source_lost(A)
    assert not transcripts.was_unreachable(t), "the request may be what broke it"
    submit(A)
    transcripts.source_opened(B, "")
    assert transcripts.was_unreachable(t)
    transcripts.source_opened(A, "")
    transcripts.source_lost(A)
    assert not transcripts.was_unreachable(t), "it came for a moment"


async def test_prompt_logprobs_of_another_epoch_or_place_are_dropped() -> None:
    t = transcript([1, 2])
    lp = TokenLogprobs(-1.0)
    for epoch, start in ((1, 1), (0, -1), (0, 0), (0, 5)):
        t.offer_prompt_logprobs(told(start, 1, epoch=epoch))
    assert t.prompt_logprobs == {}
    t.offer_prompt_logprobs(told(1, 9))
    assert t.prompt_logprobs == {1: lp}


async def test_no_token_is_delivered_before_all_of_its_prompts_logprobs() -> None:
    """Some were lost with a stream that broke: the request is computed again, and its client told of no holes."""
    t = transcript([1, 2, 3, 4], prompt_logprobs=0)
    t.offer_prompt_logprobs(told(3, 1))
    t.offer(token(0), A)
    assert (t.take(), list(t.output), t.resume_at_s) == ([], [], 5.0 + STALL_GRACE_S)
    t.offer(token(1), A)  # it does not know
    assert t.restart(blame=1.0)
    t.offer_prompt_logprobs(told(1, 2, epoch=1))
    t.offer_prompt_logprobs(told(3, 1, epoch=1))
    t.offer(token(0, epoch=1), B)
    assert [out.index for out in t.take()] == [0]
    assert sorted(t.prompt_logprobs) == [1, 2, 3]
    assert t.resume_at_s is None


async def test_a_prompt_of_one_token_has_no_logprobs_to_wait_for() -> None:
    t = transcript([1], prompt_logprobs=0)
    t.offer(token(0), A)
    assert list(t.output) == [100]


async def test_an_instance_may_fail_before_it_told_all_logprobs_of_the_prompt() -> None:
    t = transcript([1, 2, 3], prompt_logprobs=0)
    t.offer(
        TokenOut(request_id=t.request_id, epoch=Epoch(0), index=0, token_id=None, finish_reason=FinishReason.ERROR), A
    )
    assert t.finished


async def test_the_next_token_comes_from_whom_the_last_one_named() -> None:
    t = transcript()
    t.offer(token(1), B)  # overtook the first
    t.offer(token(1, token_id=666), C)
    t.offer(token(0, next_=B), A)
    assert list(t.output) == [100, 101]
    for source in (A, C):
        t.offer(token(2, token_id=666), source)
    assert list(t.output) == [100, 101]
    t.offer(token(2, next_=C), B)  # a running decode moves
    t.offer(token(3, token_id=666), B)
    t.offer(token(3), C)
    assert list(t.output) == [100, 101, 102, 103]
    assert t.source == C


NUM_TURNS = itertools.count()


def turn(index: int, next_: InstanceId, *, epoch: int = 0) -> StreamHandover:
    return StreamHandover(
        request_id=RequestId("r"), epoch=Epoch(epoch), index=index, next_instance_id=next_, num=next(NUM_TURNS)
    )


@pytest.mark.parametrize("overtakes", [False, True])
async def test_who_named_one_that_has_not_spoken_may_name_another(overtakes: bool) -> None:
    """A hands over to B, takes it back, and hands over to C, whose stream may be the faster one."""
    t = transcript()
    t.offer(token(0, next_=B), A)
    t.hand_over_stream(turn(1, A), A)
    if overtakes:
        t.offer(token(1), C)
        t.offer(token(2), C)
    t.hand_over_stream(turn(1, C), A)
    if not overtakes:
        t.offer(token(1), C)
        t.offer(token(2), C)
    t.offer(token(3, token_id=666), B)  # it woke up
    t.offer(token(3), C)
    assert list(t.output) == [100, 101, 102, 103]
    assert t.source == C


async def test_nobody_is_named_in_the_place_of_one_that_has_spoken() -> None:
    """B's last words of the turn and A's message crossed: two would go on from here, so nobody does."""
    t = transcript()
    t.offer(token(0, next_=B), A)
    t.offer(token(1), B)
    t.hand_over_stream(turn(1, C), A)
    assert (t.source, t.resume_at_s) == (B, t.clock())
    t.offer(token(1, token_id=666), C)
    assert list(t.output) == [100, 101]


async def test_turns_that_a_stream_repeats_say_nothing() -> None:
    """A worker's stream broke, and it sends its latest messages again: turns that were given, and taken since."""
    t = transcript()
    turns = [turn(1, A), turn(1, C)]
    t.offer(token(0, next_=B), A)
    for each in turns:
        t.hand_over_stream(each, A)
    for each in turns:  # nobody has spoken since: the last one still goes on
        t.hand_over_stream(each, A)
        assert (t.source, t.resume_at_s) == (C, None)
    t.offer(token(1), C)
    t.offer(token(2, next_=A), C)
    t.offer(token(3), A)
    for each in turns:
        t.hand_over_stream(each, A)
        assert (t.source, t.resume_at_s) == (A, None)
    t.hand_over_stream(turn(4, B), A)
    assert t.source == B


@pytest.mark.parametrize("source", [B, C])
async def test_a_turn_is_for_its_owner_to_give(source: InstanceId) -> None:
    t = transcript()
    t.offer(token(0), A)
    t.hand_over_stream(turn(1, C), source)
    t.offer(token(1, token_id=666), C)
    t.offer(token(1), A)
    assert list(t.output) == [100, 101]


async def test_a_turn_of_an_old_epoch_or_after_the_end_says_nothing() -> None:
    t = transcript()
    t.offer(token(0, next_=B), A)
    assert t.restart(blame=1.0)
    t.hand_over_stream(turn(1, C), A)
    assert (t.source, t.num_dropped) == (None, 1)
    t.offer(token(1, epoch=1, finish=FinishReason.LENGTH), A)
    t.hand_over_stream(turn(2, C, epoch=1), A)
    assert (t.source, t.num_dropped, t.resume_at_s) == (A, 2, None)


async def test_a_stream_that_broke_before_its_instance_spoke_is_given_more_time() -> None:
    """What it was to receive may be elsewhere yet."""
    transcripts, t = Transcripts(), transcript()
    transcripts.add(t)
    t.offer(token(0, next_=B), A)
    transcripts.source_lost(B)
    assert t.resume_at_s == t.clock() + STALL_GRACE_S
    t.hand_over_stream(turn(1, A), A)
    assert t.resume_at_s is None
    t.hand_over_stream(turn(1, C), A)
    t.offer(token(1), C)
    transcripts.source_lost(C)
    assert t.resume_at_s == t.clock() + BREAK_GRACE_S


async def test_one_that_computes_and_decodes_keeps_its_stream() -> None:
    t = transcript()
    t.offer(token(0), A)
    t.offer(token(1, token_id=666), B)
    t.offer(token(1), A)
    assert list(t.output) == [100, 101]


async def test_only_whose_turn_it_is_can_end_a_stream_with_an_error() -> None:
    failed = TokenOut(
        request_id=RequestId("r"), epoch=Epoch(0), index=1, token_id=None, finish_reason=FinishReason.ERROR
    )
    t = transcript()
    t.offer(token(0, next_=B), A)
    t.offer(failed, A)
    assert not t.finished
    t.offer(failed, B)
    assert t.finished


def told(start: int, count: int, *, epoch: int = 0, logprob: float = -1.0) -> PromptLogprobs:
    logprobs = (TokenLogprobs(logprob),) * count
    return PromptLogprobs(request_id=RequestId("r"), epoch=Epoch(epoch), start=start, logprobs=logprobs)


async def test_prompt_logprobs_come_from_all_that_compute_the_prompt_and_the_first_count() -> None:
    """Those of a helper may come later than the first token, which waits for them."""
    t = transcript([1, 2, 3, 4], prompt_logprobs=0)
    t.offer_prompt_logprobs(told(2, 1))  # a helper's, before its leader has begun to answer
    assert not t.inbox
    t.offer_prompt_logprobs(told(3, 1))
    t.offer(token(0, next_=B), A)
    t.offer(token(1), B)
    t.offer_prompt_logprobs(told(2, 1, logprob=-6.0))  # computed again
    assert (t.take(), list(t.output), t.resume_at_s) == ([], [], 5.0 + STALL_GRACE_S)
    t.offer_prompt_logprobs(told(1, 1))
    assert [out.index for out in t.take()] == [0, 1]
    assert t.source == B
    assert t.resume_at_s is None
    assert {position: each.logprob for position, each in t.prompt_logprobs.items()} == {1: -1.0, 2: -1.0, 3: -1.0}


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 9), st.sampled_from((A, B, C))), max_size=60),
    turns=st.lists(st.integers(1, 9), max_size=2, unique=True).map(sorted),
)
async def test_no_token_of_another_instance_ever_joins(
    arrivals: list[tuple[int, InstanceId]], turns: list[int]
) -> None:
    """A, B and C generate in turns, each naming the next; what any of them says out of turn is false."""

    def who(index: int) -> InstanceId:
        return (A, B, C)[sum(turn <= index for turn in turns)]

    t = transcript()
    t.offer(token(0, next_=who(1)), A)
    for index, source in arrivals:
        if source == who(index):
            next_ = who(index + 1)
            t.offer(token(index, next_=None if next_ == source else next_), source)
        else:
            t.offer(token(index, token_id=666), source)
    assert list(t.output) == [100 + index for index in range(len(t.output))]
    due = {index for index, source in arrivals if source == who(index)} | {0}
    assert len(t.output) >= next(index for index in range(11) if index not in due)


async def test_a_failed_request_takes_no_more_tokens() -> None:
    t = transcript()
    t.fail(RequestRejected("no"))
    t.offer(token(0), A)
    assert t.take() == []
    assert t.finished


async def test_waiting_names_what_is_not_finished() -> None:
    transcripts = Transcripts()
    t = transcript()
    transcripts.add(t)
    assert transcripts.waiting() == ()  # no scheduler has heard of it
    t.submitted_on = 1
    assert transcripts.waiting() == ((RequestId("r"), Epoch(0)),)
    transcripts.deliver([token(0, finish=FinishReason.STOP)], A)
    assert transcripts.waiting() == ()
    assert transcripts.current(RequestId("r"), Epoch(0)) is None
    transcripts.remove(t)
    transcripts.deliver([token(1)], A)
    assert transcripts.num_stray == 1


async def test_tokens_that_come_after_the_news_of_the_end_do_not_hide_that_the_last_one_is_missing() -> None:
    """Found by simulation: the decode instance had gone, with the last token, before its stream was ever opened."""
    t = transcript()
    t.all_drawn = True
    t.suspect(STALL_GRACE_S)
    t.offer(token(0), A)
    assert t.resume_at_s == t.clock() + STALL_GRACE_S
    t.offer(token(1, finish=FinishReason.LENGTH), A)
    assert t.resume_at_s is None
    assert t.restart(blame=1.0)
    assert not t.all_drawn


async def test_each_restart_in_vain_waits_longer_for_a_missing_token() -> None:
    t = transcript()
    graces_s = [t.stall_grace_s]
    while t.restart(blame=0.5):
        graces_s.append(t.stall_grace_s)
    assert graces_s == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert sum(graces_s) >= 90.0  # a way that is broken for so long ends no stream


async def test_a_token_makes_the_next_restart_quick_again() -> None:
    t = transcript()
    for _ in range(3):
        t.restart(blame=1.0)
    t.offer(token(0, epoch=3), A)
    assert t.stall_grace_s == STALL_GRACE_S


async def test_a_resumed_request_tells_the_class_of_who_drew_its_last_token() -> None:
    transcripts, t = Transcripts(), transcript()
    transcripts.add(t)
    transcripts.source_opened(A, "bfloat16/ordered-1")
    transcripts.source_opened(B, "bfloat16/dot-amx-1")
    assert transcripts.arithmetic_of(t) == ""
    transcripts.deliver([token(0, next_=B)], A)
    transcripts.deliver([token(2)], B)  # ahead: not delivered
    assert transcripts.arithmetic_of(t) == "bfloat16/ordered-1"
    transcripts.deliver([token(1)], B)
    transcripts.source_lost(B)
    assert t.restart(blame=1.0)
    assert t.generation(transcripts.arithmetic_of(t)).arithmetic == "bfloat16/dot-amx-1"


# --- weights ---------------------------------------------------------------------------------------------------------


async def test_all_tokens_are_drawn_with_the_weights_of_the_first() -> None:
    """An instance whose process was replaced has other weights, and its old name."""
    t = transcript()
    t.offer(token(0), A, "old")
    t.offer(token(1), A, "new")
    assert list(t.output) == [100]
    assert t.num_dropped == 1
    assert t.resume_at_s == 5.0
    assert t.restart(blame=0.0)
    assert t.generation().weights == "old"
    t.offer(token(1, epoch=1), A, "new")
    assert list(t.output) == [100]
    assert t.restart(blame=0.0)
    t.offer(token(1, epoch=2), B, "old")
    assert list(t.output) == [100, 101]


async def test_a_token_that_came_ahead_with_other_weights_is_not_delivered() -> None:
    t = transcript()
    t.offer(token(1), B, "new")
    t.offer(token(0, next_=B), A, "old")
    assert list(t.output) == [100]
    assert t.resume_at_s is not None
    assert t.restart(blame=0.0)
    t.offer(token(1, epoch=1), B, "old")
    assert list(t.output) == [100, 101]


async def test_a_request_without_tokens_may_begin_with_any_weights() -> None:
    t = transcript()
    t.offer(token(1), A, "old")
    assert t.restart(blame=0.0)
    assert t.generation().weights == ""
    t.offer(token(0, epoch=1), A, "new")
    assert t.generation().weights == "new"


async def test_hashes_go_with_the_weights_that_they_are_made_for() -> None:
    t = transcript(list(range(300)))
    hasher = PrefixHasher("token")
    root = hasher.root(b"old")
    packed = pack_token_ids(list(range(300)))
    t.prefix = PromptPrefix(hasher, root, hasher.granules(root, packed), packed[4 * 256 :], "old")
    assert (t.generation().prefix_root, t.generation().prefix_weights, len(t.generation().prefix)) == (root, "old", 2)
    t.offer(token(0), A, "new")
    assert (t.generation().prefix_root, t.generation().prefix_weights, t.generation().prefix) == (b"", "", ())


async def test_log_probabilities_of_a_prompt_are_of_one_identity() -> None:
    t = transcript(prompt_logprobs=0)
    t.offer_prompt_logprobs(told(1, 2), "old")
    assert t.restart(blame=0.0)
    t.offer_prompt_logprobs(told(2, 1, epoch=1), "new")
    assert list(t.prompt_logprobs) == [2]


def test_a_request_that_another_scheduler_had_says_how_long_ago_it_began() -> None:
    t = transcript()
    t.began_s = 2.0
    ages_s = [t.age_s]
    t.submitted_to = "the scheduler before"
    assert [*ages_s, t.age_s] == [0.0, 3.0]
