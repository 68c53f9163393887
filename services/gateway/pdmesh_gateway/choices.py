"""One generation of a job: its tokens become text, and end where a stop string does."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.errors import RequestRejected
from pdmesh.model import FinishReason
from pdmesh.wire.messages import TokenLogprobs, TokenOut
from pdmesh_gateway.detokenizer import Detokenizer
from pdmesh_gateway.request_transcript import Transcript
from pdmesh_gateway.stop import StopFinder


@dataclass(slots=True, kw_only=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    text_offsets: list[int] = field(default_factory=list[int])  # of each token: the choice's characters before it
    logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    embedding: bytes = b""  # where one was asked for, and no text: see `pdmesh.wire.messages.TokenOut`

    def extend(self, later: Delta) -> None:
        """Add a later delta, but not its text: the caller joins the pieces."""
        self.token_ids += later.token_ids
        self.text_offsets += later.text_offsets
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class GenerationFailed(RequestRejected):
    """An instance could not go on with a generation."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, code="generation_failed")


class GrammarFailed(RequestRejected):
    """An answer cannot be held to its grammar any further: too complex, or no token can follow."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"The grammar that this answer is held to cannot be obeyed at token {num_tokens}: it became too complex, "
            "or no token of this model can follow. Make it simpler.",
            code="grammar_too_complex",
        )


@dataclass(slots=True, kw_only=True)
class Choice:
    """One generation of a job, from tokens to text."""

    index: int
    transcript: Transcript
    detokenizer: Detokenizer
    stop: StopFinder
    num_tokens: int = 0
    num_characters: int = 0  # of the text so far, with what stop strings hold back
    finish_reason: str | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def advance(self, tokens: list[TokenOut]) -> Delta:
        """Turn delivered tokens into text. Raises GenerationFailed and GrammarFailed."""
        delta = Delta(index=self.index)
        params = self.transcript.params
        for token in tokens:
            finish = None if token.finish_reason is None else _finish_of(token.finish_reason)
            if finish == "error":
                if params.grammar and token.token_id is not None:  # with any other failure no token comes
                    raise GrammarFailed(self.num_tokens + 1)
                raise GenerationFailed(token.error or "The generation was aborted.")
            delta.embedding = token.embedding
            piece = ""
            if token.token_id is not None:
                self.num_tokens += 1
                delta.token_ids.append(token.token_id)
                delta.text_offsets.append(self.num_characters)
                delta.logprobs.append(token.logprobs)
                # A token that stands for the end is no text, unless its text was asked for. The last one of an answer
                # that its grammar ended is text like any other.
                is_last_text = params.grammar and token.stop_token_id is None
                is_end = finish == "stop" and not (is_last_text and token.token_id not in params.eos_token_ids)
                if not is_end or self.stop.include_stop:
                    piece = self.detokenizer.push(token.token_id)
            if finish is not None:
                piece += self.detokenizer.flush()
            self.num_characters += len(piece)
            found = None
            if self.stop.stops:
                check = self.num_tokens > params.min_tokens
                piece, found = self.stop.push(piece, check=check)
                if finish is not None and found is None:
                    is_cut = finish == "length" or token.stop_token_id is not None
                    held, found = self.stop.flush(is_cut=is_cut, check=check)
                    piece += held
            delta.text += piece
            if found is not None:
                finish, delta.stop_reason = "stop", found
            elif finish is not None:
                delta.stop_reason = token.stop_token_id
            if finish is not None:
                delta.finish_reason = self.finish_reason = finish
                break
        return delta


def _finish_of(reason: FinishReason) -> str:
    """OpenAI's word for how a generation ended."""
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.CANCELLED | FinishReason.ERROR:
            return "error"
