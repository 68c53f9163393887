"""Tokenizer and chat template of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from tokenizers import Tokenizer

from pdmesh.engine.json_files import read_json_object
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.host import num_usable_cores
from pdmesh_gateway.byte_level import ByteLevelDetokenizer, ByteLevelVocabulary, decoder_types
from pdmesh_gateway.detokenizer import Detokenizer, WindowDetokenizer
from pdmesh_gateway.histories import ChatTemplate
from pdmesh_gateway.templates import RequestTemplates, TemplateFailed, check_nesting, compile_template

T = TypeVar("T")

#: Shorter texts are processed inline, because tokenizing them takes less time than switching threads.
INLINE_CHARS = 4096

#: Texts longer than this are slow enough to delay others, so they have a limiter of their own.
HEAVY_CHARS = 128 * 1024

#: Number of characters whose tokenizing takes as long as decoding one token incrementally.
DETOKENIZED_CHARS = 64

#: Limit of token ids, above any tokenizer's: the library takes memory and time for each id up to the largest.
MAX_VOCAB_SIZE = 1 << 24

#: Prefix of a conversation's last message, to find where the message ends (`continue_final_message`).
_MARKER = "\ue000pdmesh-final\ue000"

#: Name by which transformers selects the template for conversations with tools, if a checkpoint has several.
_TOOL_TEMPLATE = "tool_use"
_MAX_TEMPLATES = 64

#: Roles whose messages cannot be continued, because a template may move them.
_MOVABLE = ("system", "developer", "tool")


class ModelTokenizer:
    """Converter of text to token ids and back, and of conversations to text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        tool_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        request_templates: RequestTemplates | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``tool_template`` renders conversations with tools; if it is None, ``template`` renders all conversations.

        ``config`` is the checkpoint's ``tokenizer_config.json``. Raise ConfigError for too large a vocabulary.
        """
        self.config = dict(config or {})
        self._tokenizer = tokenizer
        self._request_templates = request_templates
        self.template_source = template or ""
        self.tool_template_source = tool_template or self.template_source
        self._special_tokens = dict(special_tokens or {})
        self.template = _compiled(template, self._special_tokens)
        self.tool_template = _compiled(tool_template or template, self._special_tokens, is_for_tools=True)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(f"the tokenizer has a token id of {self.vocab_size - 1}: tokenizer.json is damaged")
        self._longest_token_chars = max(map(len, vocabulary), default=1)
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.added_tokens = frozenset(token.content for token in added.values())
        # llguidance does not treat special tokens, and others of this form, as text: grammars must name their ids.
        self.textless_ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoders = decoder_types(tokenizer)
        self._byte_level = ByteLevelVocabulary(tokenizer) if "ByteLevel" in decoders else None
        self._has_other_decoders = decoders != ["ByteLevel"]
        self._texts: dict[int, str] = {}
        num_cores = num_usable_cores()
        self._light = anyio.CapacityLimiter(num_cores)
        self._heavy = anyio.CapacityLimiter(max(1, num_cores // 2))

    @classmethod
    def load(cls, directory: Path, request_templates: RequestTemplates | None = None) -> ModelTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raise ConfigError if ``tokenizer.json`` is missing or a file is malformed.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{directory} has no tokenizer.json: save the checkpoint with its fast tokenizer")
        tokenizer = _read_tokenizer(path)
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        special_tokens = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in config.items()
            if name.endswith("_token") and (isinstance(token, str) or _has_content(token))
        }
        templates = _read_templates(directory, config)
        for text in (*templates.values(), *special_tokens.values()):
            _check_text(text, config_path)
        return cls(
            tokenizer,
            template=templates.get("default"),
            tool_template=templates.get(_TOOL_TEMPLATE),
            special_tokens=special_tokens,
            request_templates=request_templates,
            config=config,
        )

    def min_tokens_of(self, text: str) -> int:
        """Return a lower bound of the number of tokens in ``text``, without tokenizing."""
        return -(-len(text) // self._longest_token_chars)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``."""

        # A batch of one, because the library releases the interpreter lock for batches only.
        def encode() -> list[int]:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

        return await self._work(encode, len(text))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        def decode() -> str:
            return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

        return await self._work(decode, len(token_ids))

    async def offsets(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Return the number of characters before each token in the text of `decode`.

        A hidden token has no characters.
        """

        def offsets() -> list[int]:
            detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
            pieces = (detokenizer.push(token_id) for token_id in token_ids)
            return [0, *accumulate(map(len, pieces))][: len(token_ids)]

        return await self._work(offsets, len(token_ids) * DETOKENIZED_CHARS)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them (``token_strs`` of ``/tokenize``)."""

        def pieces() -> list[str]:
            return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

        return await self._work(pieces, len(token_ids))

    async def _work(self, work: Callable[[], T], size: int) -> T:
        """Run ``work`` inline if its ``size`` is small, else on a thread. Heavy work has a limiter of its own."""
        if size < INLINE_CHARS:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._heavy if size > HEAVY_CHARS else self._light)

    def detokenizer(
        self, prompt_tail: Sequence[int], *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return an incremental decoder for one generation. ``shown_ids`` are special tokens that are not skipped."""
        hidden_ids = self.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        if self._byte_level is None or self._has_other_decoders:
            return WindowDetokenizer(self._tokenizer, hidden_ids=hidden_ids, prompt_tail=prompt_tail)
        return ByteLevelDetokenizer(self._byte_level, hidden_ids=hidden_ids, prompt_tail=prompt_tail)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, for log-probabilities."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            # Bounded by the vocabulary.
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        if self._byte_level is not None:
            return self._byte_level.bytes_of(token_id)
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or token_id in self._added_ids:
            return self.token_text(token_id).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_format: str = "hermes",
        tells_tools: bool = False,
    ) -> str:
        """Return a conversation as the text that the model was trained on. Raises RequestRejected.

        If the template does not show calls, they are written in ``tool_format``. ``tells_tools``: the instructions list
        the tools even if the template shows them.
        """
        check_nesting(variables, "chat_template_kwargs")
        if continue_final_message:
            if add_generation_prompt:
                raise RequestRejected(
                    "Cannot set both `continue_final_message` and `add_generation_prompt` to true.",
                    param="continue_final_message",
                )
            if messages[-1].get("role") in _MOVABLE:
                raise RequestRejected(
                    f"A {messages[-1]['role']} message cannot be continued (`continue_final_message`).",
                    param="continue_final_message",
                )
            messages = [*messages[:-1], {**messages[-1], "content": (messages[-1].get("content") or "") + _MARKER}]
        everything: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            **({"tools": tools} if tools else {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        if template is not None:
            if self._request_templates is None:
                raise RequestRejected(
                    "This server does not render chat templates from requests (gateway.trust_request_templates).",
                    param="chat_template",
                    code="unsupported_value",
                )
            text = await self._request_templates.render(template, everything, tool_format=tool_format)
        else:
            num_chars = sum(len(str(m.get("content"))) for m in messages)
            # Tools, and arguments of calls, may have any size.
            is_small = num_chars < INLINE_CHARS and not tools and not any(m.get("tool_calls") for m in messages)
            text = await self._render_own(everything, tool_format, tells_tools=tells_tools, is_small=is_small)
        if not continue_final_message:
            return text
        end = text.rfind(_MARKER)
        if end < 0:
            raise RequestRejected("The chat template leaves out the final message.", param="continue_final_message")
        return text[:end]

    async def _render_own(
        self, variables: Mapping[str, Any], tool_format: str, *, tells_tools: bool, is_small: bool
    ) -> str:
        tools, template = variables.get("tools"), self.template
        if tools and not tells_tools and self.tool_template is not None and self.tool_template.tools:
            template = self.tool_template
        if template is None:
            raise RequestRejected(
                "This model has no chat template: pass `chat_template`, or use `/v1/completions`.",
                param="chat_template",
            )

        def render() -> str:
            return template.render(variables, tool_format=tool_format, tells_tools=tells_tools)

        try:
            if is_small:
                return render()
            return await anyio.to_thread.run_sync(render)
        except TemplateFailed as failed:
            raise RequestRejected(
                f"The chat template rejects this conversation: {failed}", param="messages"
            ) from failed


def _read_tokenizer(path: Path) -> Tokenizer:
    """Return the library's tokenizer after a trial. Raise ConfigError if the file is damaged."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode_batch([tokenizer.encode_batch_fast(["a b"])[0].ids])
    except BaseException as error:
        # The library raises a bare Exception or a PanicException, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"cannot read {path}: {error}") from error
    return tokenizer


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path} is not valid text: {error}") from error


def _compiled(
    template: str | None, special_tokens: Mapping[str, str], *, is_for_tools: bool = False
) -> ChatTemplate | None:
    if template is None:
        return None
    try:
        return ChatTemplate(compile_template(template), special_tokens, is_for_tools=is_for_tools)
    except TemplateFailed as failed:
        raise ConfigError(f"the checkpoint's chat template does not render: {failed}") from failed


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the checkpoint's templates by name; "default" is the template for conversations without tools.

    Files take precedence over ``tokenizer_config.json``, as in transformers.
    """
    files = sorted((directory / "additional_chat_templates").glob("*.jinja"))[:_MAX_TEMPLATES]
    named = {path.stem: path for path in files}
    if (path := directory / "chat_template.jinja").is_file():
        named["default"] = path
    if named:
        return {name: _read_text(path) for name, path in named.items()}
    template = config.get("chat_template")
    entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    return {
        str(entry.get("name")): entry["template"]
        for entry in entries[:_MAX_TEMPLATES]
        if isinstance(entry, dict) and isinstance(entry.get("template"), str)
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _has_content(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)
