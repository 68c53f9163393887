"""Requests that an instance is asked to hold: it takes their blocks, or refuses what it cannot take."""

from __future__ import annotations

import array
from functools import partial

import msgspec
import structlog

from pdmesh.core.commands import AdmitPrefill, FetchKept, PlaceDecode, SendKept
from pdmesh.core.events import KvReleased, RequestDropped
from pdmesh.engine.base import EngineSequence
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import Then
from pdmesh.instance.sequence import PromptWork, Sequence
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.offload.copies import KvLoad
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.model import (
    GRANULE_TOKENS,
    NO_TRANSFER,
    Epoch,
    GatewayId,
    PartMember,
    PrefixHashes,
    RequestId,
    SamplingParams,
    TransferId,
    num_blocks_for,
    short_weights,
)
from pdmesh.plans import PrefillGroup, TransferPlan
from pdmesh.wire.messages import Generation, Prompt, unpack_token_ids
from pdmesh.worker.block_tables import StalePrefix
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.groups import PrefillGroups
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import trace_of

log = structlog.get_logger()


class Intake:
    """Takes requests for their prompts to be computed, and room for what others send."""

    def __init__(self, context: InstanceContext, *, groups: PrefillGroups) -> None:
        self._context = context
        self._groups = groups
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self._is_open

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._is_open = False

    def admit(self, command: AdmitPrefill, prompt: Prompt | None) -> None:
        """Take a request whose prompt is to be computed here, alone or in a group."""
        decodes = command.leads and not command.moves_on
        self._context.tables.make_room(command.room)
        try:
            generation = check_prompt(command, prompt).generation
            self._groups.check(command)
            token_ids = transcript(generation)
            num_tokens = len(token_ids)
            num_output_tokens_kept = generation.max_tokens_left - 1 if decodes else 0
            request = self.take(
                generation,
                token_ids,
                command.num_blocks,
                num_tokens + num_output_tokens_kept,
                num_reused_granules=command.num_reused_granules,
                num_loaded_granules=command.num_loaded_granules,
                keeps_prefix=(command.leads or command.keeps_prefix) and not command.num_blocks_at_once,
                num_blocks_at_once=command.num_blocks_at_once,
                group=command.group,
                leads=command.leads,
            )
        except PdmeshError as error:
            self.refuse(command, error)
            return
        request.num_begun_tokens = request.num_reused_tokens
        if command.leads and request.generation.prefix_root:
            self._context.metrics.cache_queries.inc(num_tokens)
            self._context.metrics.cache_hits.inc(request.num_reused_tokens)
        if command.moves_on:
            request.state.send_on(command.transfer, Then.DECODE)
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
        self._load(request)
        self._groups.join(request, command)

    def _load(self, request: LocalRequest) -> None:
        """Begin to bring what is to come from the offload tier."""
        first, end = request.num_shared_tokens, request.num_reused_tokens
        tier = self._context.tables.tier
        if first == end or tier is None:
            return
        blocks = request.sequence.block_table[first // request.block_size : end // request.block_size]
        granules = request.chain[first // GRANULE_TOKENS : end // GRANULE_TOKENS]
        request.load = tier.load(granules, blocks, partial(self._loaded, request))
        self._context.metrics.loaded_tokens.inc(end - first)

    def _loaded(self, request: LocalRequest, load: KvLoad) -> None:
        """All of it is here, or nothing more comes: then the request starts again, unless a step finds that out."""
        if request.is_released:
            return
        if load.aborted is not None:
            if not request.in_step:
                self._context.endings.drop(request, load.aborted)
            return
        request.load = None
        first, end = (num // request.block_size for num in (request.num_shared_tokens, request.num_reused_tokens))
        if request.exchange is not None:
            request.exchange.add_computed(first, end - first)
        elif request.sender is not None:
            request.sender.add_loaded(first, end - first)

    def check_new(self, request_id: RequestId, epoch: Epoch) -> None:
        """Raise PdmeshError if nothing is taken any more, or this is held already."""
        if not self._is_open:
            raise InstanceUnavailable("the instance is stopping")
        if self._context.sequences.get(request_id, epoch) is not None:
            raise ProtocolError("the request is held here already")

    def _with_own_weights(self, generation: Generation) -> Generation:
        """Return a request without hashes that are made for other weights: its KV is kept under none of them.

        Raises ProtocolError if other weights drew its tokens.
        """
        own = self._context.weights
        if generation.weights not in ("", own):
            raise ProtocolError(
                f"the request was begun with other weights ({short_weights(generation.weights)}) than are loaded here "
                f"({short_weights(own)})"
            )
        if not generation.prefix_root or generation.prefix_weights == own:
            return generation
        return msgspec.structs.replace(generation, prefix_root=b"", prefix=())

    def take(
        self,
        generation: Generation,
        token_ids: array.array[int],
        num_blocks: int,
        max_kv_tokens: int,
        *,
        num_reused_granules: int,
        num_loaded_granules: int = 0,
        num_elsewhere_tokens: int = 0,
        num_coming_tokens: int = 0,
        keeps_prefix: bool = True,
        num_blocks_at_once: int = 0,
        group: PrefillGroup | None = None,
        leads: bool = True,
        incoming: TransferPlan | None = None,
        members: tuple[PartMember, ...] = (),
    ) -> LocalRequest:
        """Take the blocks of a request; cached blocks that it shares come first. Raises PdmeshError if it is refused.

        The KV of its first ``num_coming_tokens`` is there, or comes from another instance.

        Of the granules that are reused the last ``num_loaded_granules`` are to come from the offload tier. Other
        instances, the ``members``, hold the first ``num_elsewhere_tokens``: then nothing is kept. A prompt with
        ``num_blocks_at_once`` gives ranges back once they have left. ``incoming`` brings the KV; None: the prompt is
        computed here.
        """
        self.check_new(generation.request_id, generation.epoch)
        generation = self._with_own_weights(generation)
        num_all_blocks = num_blocks + num_elsewhere_tokens // self._context.block_size
        if num_blocks_at_once:
            if not 0 < self._context.range_tokens <= num_blocks * self._context.block_size:
                raise ProtocolError(f"{num_blocks} blocks cannot hold a range of {self._context.range_tokens} tokens")
            num_all_blocks = max(num_blocks, num_blocks_for(len(token_ids), self._context.block_size))
        check_request(
            generation,
            len(token_ids),
            num_blocks=num_all_blocks,
            max_kv_tokens=max_kv_tokens,
            block_size=self._context.block_size,
            max_model_len=self._context.max_model_len,
        )
        keeps_prefix = keeps_prefix and not num_elsewhere_tokens
        chain = generation.prefix[: (len(token_ids) - 1) // GRANULE_TOKENS] if keeps_prefix else ()
        prefix = reused(chain, num_reused_granules)
        if not 0 <= num_loaded_granules <= num_reused_granules:
            raise ProtocolError(f"{num_loaded_granules} of {num_reused_granules} granules are to be loaded")
        shared = prefix[: num_reused_granules - num_loaded_granules]
        self._context.tables.check_offloaded(prefix[len(shared) :])
        request = LocalRequest(
            generation=generation,
            sequence=EngineSequence(
                request_id=generation.request_id,
                params=generation.params,
                token_ids=token_ids,
                num_prompt_tokens=generation.num_prompt_tokens,
                block_table=self._context.tables.table(num_blocks, shared),
            ),
            state=Sequence(
                (generation.request_id, generation.epoch),
                SeqPhase.PREFILLING if incoming is None else SeqPhase.EXPECTED,
                num_blocks,
                prefix=CachedPrefix(chain, num_loaded_granules),
                prompt=PromptWork(
                    num_reused_granules * GRANULE_TOKENS, group=group, num_blocks_at_once=num_blocks_at_once
                ),
                leads=leads,
                incoming=incoming,
                members=members,
            ),
            block_size=self._context.block_size,
            max_kv_tokens=max_kv_tokens,
            num_reused_tokens=num_reused_granules * GRANULE_TOKENS,
            num_shared_tokens=len(shared) * GRANULE_TOKENS,
            trace=trace_of(self._context.tracing, generation, self._context.instance_id),
        )
        self._begin(request, num_coming_tokens)
        log.debug(
            "request held",
            request_id=request.request_id,
            epoch=request.epoch,
            num_tokens=len(token_ids),
            num_blocks=num_blocks,
        )
        self._context.gateways.open(request)
        self._context.grammars.begin(generation.params.grammar)
        return request

    def take_unknown(
        self,
        command: PlaceDecode | FetchKept | SendKept,
        num_blocks: int,
        chain: PrefixHashes,
        num_reused_granules: int,
        phase: SeqPhase,
        *,
        num_coming_tokens: int = 0,
        part: int | None = None,
        members: tuple[PartMember, ...] = (),
    ) -> LocalRequest:
        """Take blocks for a transfer of KV of which no tokens are known. Raises PdmeshError if that cannot be."""
        self.check_new(command.request_id, command.epoch)
        if num_blocks <= 0:
            raise ProtocolError("no room is asked for")
        prefix = reused(chain, num_reused_granules)
        nobody = Generation(
            request_id=command.request_id,
            epoch=command.epoch,
            gateway_id=GatewayId(""),
            token_address="",
            token_ids=b"",
            num_prompt_tokens=0,
            params=SamplingParams(max_tokens=1),
        )
        request = LocalRequest(
            generation=nobody,
            sequence=EngineSequence(
                request_id=command.request_id,
                params=nobody.params,
                token_ids=array.array("i"),
                num_prompt_tokens=0,
                block_table=self._context.tables.table(num_blocks, prefix),
            ),
            state=Sequence(
                (command.request_id, command.epoch),
                phase,
                num_blocks,
                prefix=CachedPrefix(chain),
                incoming=command.transfer,
                part=part,
                members=members,
            ),
            block_size=self._context.block_size,
            max_kv_tokens=num_blocks * self._context.block_size,
            num_reused_tokens=num_reused_granules * GRANULE_TOKENS,
            num_shared_tokens=num_reused_granules * GRANULE_TOKENS,
        )
        self._begin(request, num_coming_tokens)
        return request

    def _begin(self, request: LocalRequest, num_coming_tokens: int) -> None:
        try:
            self._context.tables.begin_windows(request, num_coming_tokens)
        except PdmeshError:
            self._context.tables.give_back(request)
            raise
        self._context.sequences.add(request)

    def refuse(
        self,
        command: AdmitPrefill | PlaceDecode | FetchKept | SendKept,
        error: PdmeshError,
        transfer_id: TransferId = NO_TRANSFER,
    ) -> None:
        """Say that it is not taken, and that ``transfer_id`` holds no room here; and what is kept, if that was why."""
        request_id, epoch, reason = command.request_id, command.epoch, str(error)
        log.warning("request refused", request_id=request_id, epoch=epoch, reason=reason)
        self._context.metrics.refused_requests.inc()
        self._context.report(RequestDropped(self._context.instance_id, request_id, epoch, reason))
        if self._context.sequences.get(request_id, epoch) is None:
            self._context.report(KvReleased(self._context.instance_id, request_id, epoch, transfer_id))
        if isinstance(error, StalePrefix):
            self._context.metrics.stale_prefixes.inc()
            self._context.tables.report_kept()


def _whole_table(request: LocalRequest) -> list[int]:
    """Return the blocks of a whole prompt, those that are not here yet among them."""
    table = request.sequence.block_table
    num_blocks = num_blocks_for(len(request.sequence.token_ids), request.block_size)
    return [*table, *[NO_BLOCK] * (num_blocks - len(table))]


def check_prompt(command: AdmitPrefill | PlaceDecode, prompt: Prompt | None) -> Prompt:
    """Return the prompt that came with a command. Raises ProtocolError if none came, or another request's."""
    if prompt is None:
        raise ProtocolError("the command came without the request's prompt")
    generation = prompt.generation
    if (generation.request_id, generation.epoch) != (command.request_id, command.epoch):
        raise ProtocolError(f"the command came with the prompt of {generation.request_id}, epoch {generation.epoch}")
    return prompt


def transcript(generation: Generation) -> array.array[int]:
    """Prompt and output so far. Raises ProtocolError if it is not whole tokens."""
    try:
        return unpack_token_ids(generation.token_ids)
    except ValueError as error:
        raise ProtocolError(f"a transcript of {len(generation.token_ids)} bytes is not whole tokens") from error


def reused(chain: PrefixHashes, num_granules: int) -> PrefixHashes:
    """Return the first granules of a chain. Raises ProtocolError if it has fewer."""
    if not 0 <= num_granules <= len(chain):
        raise ProtocolError(f"{num_granules} granules are to be reused of a chain of {len(chain)}")
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
    """A transcript of ``num_tokens``, to be held in so many blocks, may come to hold ``max_kv_tokens`` of KV.

    Raises ProtocolError if it may not.
    """
    if not 1 <= generation.num_prompt_tokens <= num_tokens <= max_model_len:
        raise ProtocolError(f"a transcript of {num_tokens} tokens, {generation.num_prompt_tokens} of them prompt")
    if generation.params.max_tokens <= num_tokens - generation.num_prompt_tokens:
        raise ProtocolError(f"no output tokens are left of {generation.params.max_tokens}")
    if max_kv_tokens > max_model_len:
        raise ProtocolError(f"{max_kv_tokens} tokens are more than the {max_model_len} of the model")
    if num_blocks < num_blocks_for(num_tokens, block_size):
        raise ProtocolError(f"{num_blocks} blocks of {block_size} cannot hold {num_tokens} tokens")
