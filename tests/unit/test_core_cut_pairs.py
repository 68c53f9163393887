"""Who could not reach whom is remembered for a while, and work goes around them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, Restart
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import InstanceJoined, InstanceLost, RequestArrived, Tick, TokenLinkReported
from pdmesh.core.instances.cut_pairs import MAX_PAIRS, CutPairs, have_way
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PrefixHash, RequestId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, bench_of, named_profile, of
from pdmesh_testing.modelled import modelled_profile

MEMORY_S = CoreConfig().cut_memory_s

#: A millisecond for each prompt token, 30 for each that decodes: prompts are computed beside decodes, too.
LATENCY = LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0, decode_s=0.03)
LOCALLY = PolicyConfig(latency=LATENCY, slo_tpot_s=0.2, prefill_step_s=0.2, long_prompt_tokens=1000)


def test_a_pair_has_no_direction_and_is_forgotten_in_time() -> None:
    cut = CutPairs(MEMORY_S)
    assert not cut
    cut.note("b", "a", 0.0)
    cut.note("c", "a", 1.0)
    assert (cut.of("a"), cut.of("b"), cut.of("d")) == ({"b", "c"}, {"a"}, set())
    cut.note("a", "b", 2.0)  # again
    cut.expire(1.0 + MEMORY_S)
    assert cut.of("a") == {"b"}
    cut.expire(2.0 + MEMORY_S)
    assert not cut
    assert not cut.of("a")


def test_who_is_gone_or_was_reached_is_forgotten_at_once() -> None:
    cut = CutPairs(MEMORY_S)
    for other in "bcd":
        cut.note("a", other, 0.0)
    cut.forgive("b", "a")
    cut.forgive("b", "a")
    assert cut.of("a") == {"c", "d"}
    cut.forget("a")
    assert not cut
    assert not cut.of("c")


def test_no_more_are_remembered_than_a_number() -> None:
    cut = CutPairs(MEMORY_S)
    for number in range(MAX_PAIRS + 2):
        cut.note("a", str(number), 0.0)
    assert len(cut.of("a")) == MAX_PAIRS
    assert cut.of("0") == cut.of("1") == set()


def decodes_on(commands: list[Command]) -> str:
    (place,) = of(ExpectCopy, commands)
    return place.instance_id


def with_a_failed_transfer() -> tuple[CoreBench, str, str]:
    """A mesh where p could not reach one of d0 and d1, and a request went to the other."""
    bench = bench_of("p", "d0", "d1")
    failed = decodes_on(bench.arrive("first"))
    other = decodes_on(bench.failed("p", "first", "the peer received nothing for 2 s"))
    assert {failed, other} == {"d0", "d1"}
    return bench, failed, other


def test_a_request_is_not_sent_to_whom_its_prefill_instance_could_not_reach() -> None:
    bench, failed, other = with_a_failed_transfer()
    bench.released(failed, "first")
    assert [bench.decoding(f"r{number}") for number in range(3)] == [other] * 3
    bench.feed(Tick(), at_s=MEMORY_S)
    assert bench.decoding("later") == failed  # which has nothing to do


def test_it_waits_for_room_there_rather_than_go_where_it_cannot() -> None:
    bench = CoreBench(*(named_profile(name, max_num_seqs=1) for name in ("p", "d0", "d1")))
    failed = decodes_on(bench.arrive("first"))
    bench.failed("p", "first", "the peer received nothing for 2 s")
    bench.released(failed, "first")
    assert of(ExpectCopy, bench.arrive("second")) == []
    bench.feed(Tick(), at_s=MEMORY_S)
    assert {place.instance_id for place in of(ExpectCopy, bench.commands) if place.request_id == "second"} == {failed}


@pytest.mark.parametrize("how", ["the other is lost", "another process comes", "it is alone"])
def test_it_is_tried_again_where_there_is_no_other_way(how: str) -> None:
    bench, failed, other = with_a_failed_transfer()
    bench.released(failed, "first")
    match how:
        case "another process comes":
            bench.feed(InstanceJoined(replace(named_profile(failed), pid=7), ()))
            assert {bench.decoding(f"r{number}") for number in range(3)} == {failed, other}
        case _:
            bench.feed(InstanceLost(InstanceId(other)))
            assert decodes_on(bench.arrive("second")) == failed


def test_a_request_that_its_gateway_did_not_hear_of_goes_elsewhere_and_so_do_others_of_that_gateway() -> None:
    bench = bench_of("p0", "p1", "d0", "d1")
    failed = decodes_on(bench.arrive("r"))
    arrived = RequestArrived(a_request("r", epoch=1), silent_source_id=InstanceId(failed))
    (other,) = {"d0", "d1"} - {failed}
    assert decodes_on(bench.feed(arrived)) == other
    assert decodes_on(bench.arrive("s")) == other


def test_nor_is_a_prompt_computed_where_its_gateway_does_not_hear_of_it() -> None:
    bench = bench_of("p0", "p1", "d")
    (admitted,) = of(AdmitPrefill, bench.arrive("r"))
    (other,) = {"p0", "p1"} - {admitted.instance_id}
    again = RequestArrived(a_request("r", epoch=1), silent_source_id=admitted.instance_id)
    assert [each.instance_id for each in of(AdmitPrefill, bench.feed(again))] == [other]


def test_who_does_not_reach_a_gateway_holds_ranges_of_its_contexts() -> None:
    """Of three, one computes the prompt, one decodes, and the third only answers the second."""
    bench = CoreBench(*(named_profile(f"m{number}", max_kv_tokens=16) for number in range(3)))
    again = RequestArrived(a_request("r", prompt=20, epoch=1), silent_source_id=InstanceId("m0"))
    home, member = [place.instance_id for place in of(ExpectCopy, bench.feed(again))]
    (admitted,) = of(AdmitPrefill, bench.commands)
    assert member == "m0"
    assert {home, admitted.instance_id} == {"m1", "m2"}


def test_a_context_that_is_spread_does_not_decode_where_its_prompt_is_computed() -> None:
    """So it takes two that its gateway hears, or one that it does not."""
    bench = CoreBench(*(named_profile(f"m{number}", max_kv_tokens=16) for number in range(3)))
    instances = list(bench.core._mesh.instances.values())
    cut = CutPairs(MEMORY_S)
    cut.note(GATEWAY, "m0", 0.0)
    assert have_way(a_request("r", prompt=20), instances, cut)
    cut.note(GATEWAY, "m1", 0.0)
    assert not have_way(a_request("r", prompt=20), instances, cut)
    assert have_way(a_request("r", prompt=8), instances, cut)


def test_an_instance_that_nobody_knows_is_not_remembered() -> None:
    bench = bench_of("p", "d")
    bench.feed(RequestArrived(a_request("r", epoch=1), silent_source_id=InstanceId("no such")))
    assert not bench.core._mesh.cut
    assert GATEWAY not in bench.core._mesh.cut.of("no such")


def is_up(instance_id: str, up: bool) -> TokenLinkReported:
    return TokenLinkReported(InstanceId(instance_id), GATEWAY, up)


def test_what_an_instance_that_does_not_reach_the_gateway_was_to_receive_goes_to_another() -> None:
    bench = bench_of("p", "d0", "d1")
    first = decodes_on(bench.arrive("r"))
    (other,) = {"d0", "d1"} - {first}
    commands = bench.feed(is_up(first, False))
    assert decodes_on(commands) == other
    assert of(Restart, commands) == []
    bench.released(first, "r")
    assert bench.decoding("s") == other
    bench.feed(is_up(first, True))
    assert bench.decoding("t") == first


def test_what_computes_or_decodes_there_starts_again_elsewhere_though_the_gateway_says_nothing() -> None:
    bench = bench_of("p0", "p1", "d")
    (admitted,) = of(AdmitPrefill, bench.arrive("r"))
    commands = bench.feed(is_up(admitted.instance_id, False))
    assert [(each.request_id, each.blame) for each in of(Restart, commands)] == [("r", 0.0)]
    (again,) = of(AdmitPrefill, bench.arrive("r", epoch=1))
    assert again.instance_id != admitted.instance_id


@pytest.mark.parametrize(("epoch", "restarts"), [(0, ["r"]), (1, [])])
def test_a_prompt_whose_first_token_was_lost_starts_again_though_its_decode_goes_on(
    epoch: int, restarts: list[str]
) -> None:
    """Its gateway waited for that token for four seconds."""
    bench = bench_of("p0", "p1", "d")
    assert bench.decoding("r") == "d"
    (admitted,) = of(AdmitPrefill, bench.commands)
    assert bench.decoding("s") == "d"
    unconfirmed = ((RequestId("r"), Epoch(epoch)), (RequestId("gone"), Epoch(0)))
    commands = bench.feed(replace(is_up(admitted.instance_id, False), unconfirmed=unconfirmed))
    assert [each.request_id for each in of(Restart, commands)] == restarts


def test_an_instance_speaks_of_no_request_that_it_was_not_given() -> None:
    """Of any of the gateway's it could say that its tokens were lost, again and again, and have it restarted."""
    bench = bench_of("p0", "p1", "d0", "d1")
    on = bench.decoding("r")
    prefills = {each.instance_id for each in of(AdmitPrefill, bench.commands)}
    (stranger,) = {"p0", "p1"} - prefills
    (other,) = {"d0", "d1"} - {on}
    unconfirmed = ((RequestId("r"), Epoch(0)),)
    for named_by in (stranger, other):
        commands = bench.feed(replace(is_up(named_by, False), unconfirmed=unconfirmed))
        assert of(Restart, commands) == []
    (given,) = prefills
    bench.feed(is_up(stranger, True))
    commands = bench.feed(replace(is_up(given, False), unconfirmed=unconfirmed))
    assert [each.request_id for each in of(Restart, commands)] == ["r"]


def test_all_goes_on_where_no_instance_reaches_the_gateway() -> None:
    bench = bench_of("p", "d")
    bench.arrive("r")
    assert bench.feed(is_up("d", False)) == bench.feed(is_up("p", False)) == []
    assert decodes_on(bench.arrive("s")) == "d"


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_an_instance_keeps_attracts_nothing_of_a_gateway_that_does_not_hear_of_it(is_cut: bool) -> None:
    """A next turn goes where the last one decoded, beside the decodes there, if that is the cheapest."""
    d0, d1 = (modelled_profile(name, Role.DECODE, num_blocks=1000, block_size=16) for name in ("d0", "d1"))
    kept = tuple([PrefixHash(bytes([number]) * 16) for number in range(4)])
    bench = CoreBench(config=CoreConfig(policy=LOCALLY, plans_in_flight=2))
    bench.feed(BundleChangeRequested("pdmesh"))
    bench.feed(InstanceJoined(modelled_profile("p", Role.PREFILL, num_blocks=1000, block_size=16), ()))
    bench.feed(InstanceJoined(d0, (), kept=kept))
    bench.feed(InstanceJoined(d1, ()))
    if is_cut:
        bench.feed(is_up("d0", False))
    bench.feed(RequestArrived(a_request("busy-0", 200)))
    bench.feed(RequestArrived(a_request("busy-1", 200)))
    turn = replace(a_request("turn", prompt=GRANULE_TOKENS * 4 + 8), prefix=kept)
    admitted = of(AdmitPrefill, bench.feed(RequestArrived(turn)))
    assert [each.instance_id for each in admitted] == (["d1"] if is_cut else ["d0"])
