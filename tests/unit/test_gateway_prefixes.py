"""What a gateway says of a prompt's KV: equal hashes for what may be shared, and for nothing else."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.files import DefaultSampling, ModelInfo, load_model_info
from pdmesh.errors import RequestRejected
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import GatewayId, InstanceId, PrefixHashes, RequestId, SamplingParams
from pdmesh.prefixes import PrefixHasher
from pdmesh.wire.messages import TokenOut, pack_token_ids
from pdmesh_gateway.mailbox import Mailbox
from pdmesh_gateway.prompt_prefixes import INLINE_BYTES, Prefixes, PromptPrefix
from pdmesh_gateway.request_transcript import Transcript
from pdmesh_gateway.sampling import cache_salt

pytestmark = pytest.mark.anyio

INFO = ModelInfo(
    architecture="llama",
    max_model_len=1 << 20,
    vocab_size=300,
    eos_token_ids=(2,),
    default_sampling=DefaultSampling(),
    fingerprint=b"a model",
)
PARAMS = SamplingParams(max_tokens=10)
PROMPT = pack_token_ids(list(range(1000)))


async def of(
    prompt: bytes = PROMPT,
    *,
    params: SamplingParams = PARAMS,
    tenant: str = "alice",
    salt: str = "",
    sharing: str = "tenant",
    mesh_token: str = "token",
    info: ModelInfo = INFO,
    model: str = "served",
    weights: str = "",
) -> PromptPrefix:
    prefixes = Prefixes(mesh_token, sharing, info, model)
    return await prefixes.of(prompt, params, tenant=tenant, salt=salt, weights=weights)


async def test_weights_of_two_identities_have_no_hash_in_common() -> None:
    one, other = await of(weights="one"), await of(weights="other")
    assert one.granules
    assert not set(one.granules) & set(other.granules)
    assert one.granules == (await of(weights="one")).granules
    assert (one.weights, other.weights) == ("one", "other")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=700), st.lists(st.integers(0, 2**31 - 1), max_size=700))
def test_hashes_are_equal_as_far_as_tokens_are(one: list[int], other: list[int]) -> None:
    hasher = PrefixHasher("token")
    root = hasher.root(b"facts")
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    hashes = [hasher.granules(root, pack_token_ids(tokens)) for tokens in (one, one[:common] + other[common:])]
    num_equal = next((i for i, (a, b) in enumerate(zip(*hashes, strict=False)) if a != b), min(map(len, hashes)))
    assert num_equal == common // GRANULE_TOKENS
    assert len(hashes[0]) == len(one) // GRANULE_TOKENS
    assert all(len(granule) == 16 for granule in hashes[0])


@given(st.lists(st.integers(0, 2**31 - 1), max_size=500), st.integers(0, 500))
def test_a_chain_goes_on_where_it_ended(tokens: list[int], cut: int) -> None:
    hasher = PrefixHasher("token")
    root, packed = hasher.root(), pack_token_ids(tokens)
    begun = hasher.granules(root, pack_token_ids(tokens[:cut]))
    rest = hasher.granules(begun[-1] if begun else root, packed[4 * GRANULE_TOKENS * len(begun) :])
    assert begun + rest == hasher.granules(root, packed)


def test_facts_are_told_apart_by_their_lengths() -> None:
    hasher = PrefixHasher("token")
    roots = [hasher.root(b"ab", b"c"), hasher.root(b"a", b"bc"), hasher.root(b"abc"), hasher.root(b"abc", b"")]
    assert len(set(roots)) == len(roots)


async def test_nothing_is_shared_with_others() -> None:
    """Another tenant, salt, mesh, model or file of settings: not a hash in common, whatever the tokens."""
    prefixes = [
        await of(),
        await of(tenant="bob"),
        await of(tenant=""),
        await of(salt="alice"),
        await of(tenant="bob", salt="alice"),
        await of(tenant="alice ", salt=""),
        await of(tenant="", salt="alice"),
        await of(mesh_token="other"),
        await of(mesh_token=""),
        await of(model="other"),
        await of(info=replace(INFO, fingerprint=b"another")),
        await of(sharing="all"),
    ]
    granules = [granule for prefix in prefixes for granule in (prefix.root, *prefix.granules)]
    assert len(set(granules)) == len(granules) == len(prefixes) * 8


async def test_all_share_if_they_are_to() -> None:
    assert (await of(sharing="all")).granules == (await of(sharing="all", tenant="bob")).granules
    assert (await of(sharing="all", salt="x")).root != (await of(sharing="all")).root


async def test_where_reuse_would_change_a_result_there_is_none() -> None:
    dynamic = replace(INFO, max_fixed_rope_tokens=999)
    for none in (
        await of(sharing="off"),
        await of(params=replace(PARAMS, prompt_logprobs=0)),
        await of(info=dynamic),
    ):
        assert (none.root, none.granules, none.with_output(bytes(4096))) == (b"", (), ())
    assert (await of(info=replace(INFO, max_fixed_rope_tokens=1000))).root


async def test_a_long_prompt_is_hashed_on_a_thread_with_the_same_result() -> None:
    long = pack_token_ids(list(range(INLINE_BYTES // 4 + 200)))
    prefix = await of(long)
    assert prefix.granules == prefix.hasher.granules(prefix.root, long)
    assert prefix.tail == long[-4 * (200 % GRANULE_TOKENS) :]


def test_dynamic_rope_is_told_from_the_files(tmp_path: Path, tiny_config: dict[str, object]) -> None:
    def info(**changes: object) -> ModelInfo:
        (tmp_path / "config.json").write_text(json.dumps({**tiny_config, **changes}))
        return load_model_info(tmp_path)

    assert info().max_fixed_rope_tokens is None
    scaled = info(max_position_embeddings=512, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert scaled.max_fixed_rope_tokens == 512
    assert len({info().fingerprint, scaled.fingerprint, info(rope_theta=5e5).fingerprint}) == 3


@pytest.fixture
def tiny_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }


async def test_a_resumed_request_has_the_hashes_of_what_was_delivered() -> None:
    prefix = await of(pack_token_ids(list(range(200))))
    transcript = Transcript(
        request_id=RequestId("r"),
        gateway_id=GatewayId("g"),
        token_address="",
        prompt=pack_token_ids(list(range(200))),
        params=SamplingParams(max_tokens=1000),
        mailbox=Mailbox(),
        clock=time.monotonic,
        prefix=prefix,
    )
    source = InstanceId("i")
    for index in range(100):
        token = TokenOut(
            request_id=RequestId("r"), epoch=transcript.epoch, index=index, token_id=200 + index, num_cached_tokens=128
        )
        transcript.offer(token, source)
    assert transcript.num_cached_tokens == 128
    assert transcript.generation().prefix_root == prefix.root

    def whole(num_tokens: int) -> PrefixHashes:
        return prefix.hasher.granules(prefix.root, pack_token_ids(list(range(num_tokens))))

    assert transcript.generation().prefix == whole(300)
    assert transcript.restart(blame=0.0)
    assert transcript.generation().prefix == whole(300)


@pytest.mark.parametrize("said", [0, 10**12])
def test_a_worker_that_says_too_much_is_not_believed(said: int) -> None:
    transcript = Transcript(
        request_id=RequestId("r"),
        gateway_id=GatewayId("g"),
        token_address="",
        prompt=pack_token_ids([1, 2, 3]),
        params=PARAMS,
        mailbox=Mailbox(),
        clock=time.monotonic,
    )
    token = TokenOut(request_id=RequestId("r"), epoch=transcript.epoch, index=0, token_id=7, num_cached_tokens=said)
    transcript.offer(token, InstanceId("i"))
    assert transcript.num_cached_tokens == min(said, 3)
    assert transcript.generation().prefix == ()


def test_an_empty_salt_is_refused() -> None:
    assert cache_salt(None) == ""
    assert cache_salt("x" * 100_000) == "x" * 100_000
    with pytest.raises(RequestRejected, match="non-empty"):
        cache_salt("")
