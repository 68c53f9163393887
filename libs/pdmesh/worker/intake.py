"""New requests of an instance: checking their prompts and taking their blocks."""

from __future__ import annotations

import array
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, SendCopy
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.instance.copy_state import range_at
from pdmesh.instance.floor import TakesBlocks
from pdmesh.instance.sequence import Sequence
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.kv_layout import GRANULE_TOKENS, num_blocks_for
from pdmesh.model import GatewayId, PrefixHashes, RequestKey, SamplingParams, Then, short_weights
from pdmesh.wire.messages import Generation, Prompt, unpack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.groups import PrefillGroups
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import trace_of

log = structlog.get_logger()


class Intake:
    """Builder of requests from commands. ``last_prompt`` came with the last command."""

    def __init__(self, context: InstanceContext, *, groups: PrefillGroups) -> None:
        self._context = context
        self._groups = groups
        self.is_open = True
        self.last_prompt: Prompt | None = None

    def chain_of(self, key: RequestKey) -> PrefixHashes:
        """Return the last prompt's cacheable granules; none for another request, or for hashes of other weights."""
        prompt = self.last_prompt
        if prompt is None or key != (prompt.generation.request_id, prompt.generation.epoch):
            return ()
        generation = self._with_own_hashes(prompt.generation)
        num_tokens = generation.num_tokens or prompt.num_context_tokens
        return generation.prefix[: max(0, num_tokens - 1) // GRANULE_TOKENS]

    def take(self, state: Sequence, command: TakesBlocks, num_reused_granules: int) -> LocalRequest:
        """Take the blocks of a request, shared cached blocks first. Raises PdmeshError if the request is refused.

        The last ``state.prefix.num_loaded`` of the reused granules come from the offload tier.
        """
        context = self._context
        if not self.is_open:
            raise InstanceUnavailable("the instance is stopping")
        if context.sequences.get(*state.key) is not None:
            raise ProtocolError("the request is already on this instance")
        num_coming_tokens, max_kv_tokens, num_elsewhere_blocks = 0, state.num_blocks * context.block_size, 0
        has_prompt = isinstance(command, AdmitPrefill) or (isinstance(command, ExpectCopy) and command.receives_prompt)
        if isinstance(command, AdmitPrefill):
            generation, token_ids = self._to_compute(command)
            max_kv_tokens = len(token_ids)
            if command.leads and not command.moves_on:
                max_kv_tokens += generation.max_tokens_left - 1
        elif isinstance(command, ExpectCopy) and command.receives_prompt:
            generation, token_ids = self._to_receive(command)
            num_coming_tokens = len(token_ids)
            num_elsewhere_blocks = command.transfer.destinations[0].part.blocks.start
            max_kv_tokens = generation.num_prompt_tokens + generation.params.max_tokens - 1
        else:
            self._check_copy(command)
            generation, token_ids = _unknown(state.key), array.array("i")
            if isinstance(command, ExpectCopy) and command.transfer.then is Then.KEEP:
                num_coming_tokens = len(command.chain) * GRANULE_TOKENS
        if has_prompt:
            num_blocks = state.num_blocks + num_elsewhere_blocks
            self._check_request(generation, state, len(token_ids), num_blocks, max_kv_tokens)
        num_loaded_granules, prefix = state.prefix.num_loaded, reused(state.chain, num_reused_granules)
        if not 0 <= num_loaded_granules <= num_reused_granules:
            raise ProtocolError(f"{num_loaded_granules} of {num_reused_granules} cached blocks are to be loaded")
        shared = prefix[: num_reused_granules - num_loaded_granules]
        context.tables.check_offloaded(prefix[len(shared) :])
        request = LocalRequest(
            generation=generation,
            sequence=EngineSequence(
                request_id=generation.request_id,
                params=generation.params,
                token_ids=token_ids,
                num_prompt_tokens=generation.num_prompt_tokens,
                block_table=context.tables.table(state.num_blocks, shared),
            ),
            state=state,
            block_size=context.block_size,
            max_kv_tokens=max_kv_tokens,
            num_reused_tokens=num_reused_granules * GRANULE_TOKENS,
            num_shared_tokens=len(shared) * GRANULE_TOKENS,
            trace=trace_of(context.tracing, generation, context.instance_id),
        )
        try:
            if isinstance(command, AdmitPrefill):
                context.tables.states.want(request, command.states)
            context.tables.begin_windows(request, num_coming_tokens)
        except PdmeshError:
            context.tables.give_back(request)
            raise
        context.sequences.add(request)
        if has_prompt:
            context.gateways.open(request)
            context.grammars.begin(generation.params.grammar)
        if isinstance(command, AdmitPrefill):
            self._begin(request, command)
        return request

    # --- checks ---

    def _to_compute(self, command: AdmitPrefill) -> tuple[Generation, array.array[int]]:
        """Return the prompt and the tokens to compute. Raises ProtocolError if this instance cannot compute them."""
        generation = self._checked(self.check_prompt(command).generation)
        self._groups.check(command)
        return generation, _transcript(generation)

    def _to_receive(self, command: ExpectCopy) -> tuple[Generation, array.array[int]]:
        """Return the prompt and the tokens whose KV will come. Raises ProtocolError if it cannot be received here."""
        self._context.addresses.of(command.transfer.source_ids)
        self._context.addresses.of(command.transfer.destination_ids[1:])
        prompt = self.check_prompt(command)
        num_context_tokens = prompt.num_context_tokens
        if prompt.generation.token_ids:
            token_ids = _transcript(prompt.generation)
        else:
            token_ids = stand_in(num_context_tokens, prompt.tail, self._context.max_model_len)
        if len(token_ids) != num_context_tokens:
            raise ProtocolError(f"{num_context_tokens} tokens of KV for a transcript of {len(token_ids)}")
        return self._checked(prompt.generation), token_ids

    def _check_copy(self, command: ExpectCopy | SendCopy) -> None:
        """Raise ProtocolError if a copy of KV without a prompt cannot begin.

        For a lost range the sources are not checked, because the tokens come from the instance that decodes.
        """
        transfer, addresses = command.transfer, self._context.addresses
        num_shared_granules = transfer.num_reused_granules
        if isinstance(command, SendCopy):
            if len(transfer.destinations) != 1:
                raise ProtocolError(f"a fetch has {len(transfer.destinations)} destinations")
            addresses.of(transfer.destination_ids)
            num_granules = transfer.sources[0].num_blocks * self._context.block_size // GRANULE_TOKENS
            if not 0 < num_granules == len(command.chain):
                raise ProtocolError(
                    f"the chain has {len(command.chain)} cached blocks, the destination room for {num_granules}"
                )
            return
        if command.instance_id not in transfer.destination_ids:
            raise ProtocolError("the instance is not a destination of the transfer")
        if not transfer.computes and not command.num_loaded_granules:
            addresses.of(transfer.source_ids)
        num_tokens = command.num_blocks * self._context.block_size
        if num_tokens <= num_shared_granules * GRANULE_TOKENS:
            raise ProtocolError(f"the command has room for {num_tokens} tokens and {num_shared_granules} cached blocks")
        if transfer.then is Then.KEEP:
            if not num_shared_granules < len(command.chain) <= num_tokens // GRANULE_TOKENS:
                raise ProtocolError(
                    f"the chain has {len(command.chain)} cached blocks, the destination room for {num_tokens} tokens"
                )
            return
        addresses.of(each.instance_id for each in command.members)
        if range_at(transfer, command.instance_id) is not None:
            addresses.of([command.home_id or transfer.destination_ids[0]])
        if transfer.is_hand_over:
            self.check_prompt(command)

    def check_prompt(self, command: AdmitPrefill | ExpectCopy) -> Prompt:
        """Return the prompt that came with a command. Raises ProtocolError if none came, or another request's."""
        if self.last_prompt is None:
            raise ProtocolError("the command came without the request's prompt")
        generation = self.last_prompt.generation
        if (generation.request_id, generation.epoch) != (command.request_id, command.epoch):
            raise ProtocolError(
                f"the command came with the prompt of {generation.request_id}, epoch {generation.epoch}"
            )
        return self.last_prompt

    def _checked(self, generation: Generation) -> Generation:
        """Return the request with usable hashes only. Raises ProtocolError if other weights drew the tokens."""
        own = self._context.weights
        if generation.weights not in ("", own):
            raise ProtocolError(
                f"the request was started with other weights ({short_weights(generation.weights)}) than are loaded "
                f"here ({short_weights(own)})"
            )
        return self._with_own_hashes(generation)

    def _with_own_hashes(self, generation: Generation) -> Generation:
        """Return the request without hashes that belong to other weights, so that its KV is not cached under them."""
        if not generation.prefix_root or generation.prefix_weights == self._context.weights:
            return generation
        return msgspec.structs.replace(generation, prefix_root=b"", prefix=())

    def _check_request(
        self, generation: Generation, state: Sequence, num_tokens: int, num_blocks: int, max_kv_tokens: int
    ) -> None:
        """Raise ProtocolError unless a prompt fits into its blocks, here and on other instances."""
        range_tokens, block_size = self._context.range_tokens, self._context.block_size
        if state.prompt.num_blocks_at_once:
            if not 0 < range_tokens <= num_blocks * block_size:
                raise ProtocolError(f"{num_blocks} blocks cannot hold a range of {range_tokens} tokens")
            num_blocks = max(num_blocks, num_blocks_for(num_tokens, block_size))
        check_request(
            generation,
            num_tokens,
            num_blocks=num_blocks,
            max_kv_tokens=max_kv_tokens,
            block_size=block_size,
            max_model_len=self._context.max_model_len,
        )

    # --- prompts that are computed here ---

    def _begin(self, request: LocalRequest, command: AdmitPrefill) -> None:
        """Offer the KV of a prompt to its receiver, and load granules from the offload tier."""
        request.num_begun_tokens = request.num_reused_tokens
        num_tokens = len(request.sequence.token_ids)
        if command.leads and request.generation.prefix_root:
            self._context.metrics.cache_queries.inc(num_tokens)
            self._context.metrics.cache_hits.inc(request.num_reused_tokens)
            self._context.metrics.unseen_tokens.inc(self._context.tables.num_stateless_tokens(request))
        if command.moves_on:
            sources = command.shards if command.transfer is None else command.transfer.sources
            source = [shard.instance_id for shard in sources].index(self._context.instance_id)
            request.sender = self._context.mover.departures.offer(
                request.request_id,
                request.epoch,
                block_ids=_whole_table(request),
                num_context_tokens=num_tokens,
                source=source,
                blocks=sources[source].part.blocks,
                num_present_blocks=request.num_shared_tokens // request.block_size,
            )
        self.load(request, self._loaded)

    def load(self, request: LocalRequest, on_ended: Callable[[LocalRequest, KvLoad], None]) -> None:
        """Begin to load the reused granules that are in the offload tier, if any. ``on_ended`` is called at the end."""
        first, end = request.num_shared_tokens, request.num_reused_tokens
        tier = self._context.tables.tier
        if first == end or tier is None:
            return
        blocks = request.sequence.block_table[first // request.block_size : end // request.block_size]
        granules = request.chain[first // GRANULE_TOKENS : end // GRANULE_TOKENS]
        request.load = tier.load(granules, blocks, partial(on_ended, request))
        self._context.metrics.loaded_tokens.inc(end - first)

    def _loaded(self, request: LocalRequest, load: KvLoad) -> None:
        """Handle the end of a load: use the loaded KV, or drop the request, so that it starts again.

        If a load is aborted while a step uses the request, the step handles this. A released request is ignored.
        """
        if request.is_released:
            return
        if load.aborted is not None:
            if not request.in_step:
                self._context.drop(request, load.aborted)
            return
        request.load = None
        first, end = (num // request.block_size for num in (request.num_shared_tokens, request.num_reused_tokens))
        if request.exchange is not None:
            request.exchange.add_computed(first, end - first)
        elif request.sender is not None:
            request.sender.add_loaded(first, end - first)


def _unknown(key: RequestKey) -> Generation:
    """Return a request with no known tokens."""
    return Generation(
        request_id=key[0],
        epoch=key[1],
        gateway_id=GatewayId(""),
        token_address="",
        token_ids=b"",
        num_prompt_tokens=0,
        params=SamplingParams(max_tokens=1),
    )


def _whole_table(request: LocalRequest) -> list[int]:
    """Return the blocks of a whole prompt, with `NO_BLOCK` for blocks that are not allocated yet."""
    table = request.sequence.block_table
    num_blocks = num_blocks_for(len(request.sequence.token_ids), request.block_size)
    return [*table, *[NO_BLOCK] * (num_blocks - len(table))]


def _transcript(generation: Generation) -> array.array[int]:
    """Return the tokens of prompt and output so far. Raises ProtocolError if the bytes are not whole tokens."""
    try:
        return unpack_token_ids(generation.token_ids)
    except ValueError as error:
        raise ProtocolError(f"a transcript of {len(generation.token_ids)} bytes is not whole tokens") from error


def stand_in(num_tokens: int, tail: bytes, max_model_len: int) -> array.array[int]:
    """Return a placeholder for a prompt whose tokens are not needed: zeros, then the packed tokens of ``tail``.

    ``tail`` has the tokens after the last full granule. Raises ProtocolError if these are no tokens, or too many.
    """
    if len(tail) % 4 or len(tail) > 4 * min(num_tokens, GRANULE_TOKENS):
        raise ProtocolError(f"a prompt of {num_tokens} tokens ends in {len(tail)} bytes")
    num_zeros = min(max(0, num_tokens - len(tail) // 4), max_model_len)
    return array.array("i", bytes(4 * num_zeros)) + unpack_token_ids(tail)


def reused(chain: PrefixHashes, num_granules: int) -> PrefixHashes:
    """Return the first granules of a chain. Raises ProtocolError if the chain has fewer."""
    if not 0 <= num_granules <= len(chain):
        raise ProtocolError(f"{num_granules} cached blocks are to be reused, but the chain has {len(chain)}")
    return chain[:num_granules]


def check_request(
    generation: Generation,
    num_tokens: int,
    *,
    num_blocks: int,
    max_kv_tokens: int,
    block_size: int,
    max_model_len: int,
) -> None:
    """Raise ProtocolError unless a transcript of ``num_tokens`` fits.

    The transcript must fit into ``num_blocks``, have output tokens left, and with ``max_kv_tokens`` at the end stay
    within the model's length.
    """
    if not 1 <= generation.num_prompt_tokens <= num_tokens <= max_model_len:
        raise ProtocolError(f"a transcript of {num_tokens} tokens, {generation.num_prompt_tokens} of them prompt")
    if generation.params.max_tokens <= num_tokens - generation.num_prompt_tokens:
        raise ProtocolError(f"no output tokens are left of {generation.params.max_tokens}")
    if max_kv_tokens > max_model_len:
        raise ProtocolError(f"{max_kv_tokens} tokens exceed the model's context of {max_model_len}")
    if num_blocks < num_blocks_for(num_tokens, block_size):
        raise ProtocolError(f"{num_blocks} blocks of {block_size} cannot hold {num_tokens} tokens")
