"""A generation of a job: its tokens become text, which ends at a stop string."""

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
    """New tokens, text and state of one choice.

    ``text_offsets``: for each token, the number of the choice's characters before it. ``embedding``: set if the request
    asks for one instead of text, see `pdmesh.wire.messages.TokenOut`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    text_offsets: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    embedding: bytes = b""

    def extend(self, later: Delta) -> None:
        """Add a later delta, but not its text: the caller joins the pieces."""
        self.token_ids += later.token_ids
        self.text_offsets += later.text_offsets
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class GenerationFailed(RequestRejected):
    """Error of a generation that an instance could not continue."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, code="generation_failed")


class GrammarFailed(RequestRejected):
    """Error of an answer whose grammar became too complex, or allows no token that the model has."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"The answer cannot follow its grammar at token {num_tokens}: the grammar became too complex, or allows no "
            "token of this model. Simplify the grammar.",
            code="grammar_too_complex",
        )


@dataclass(slots=True, kw_only=True)
class Choice:
    """A generation of a job, from tokens to text.

    ``num_characters`` counts the text so far, including the text that stop strings hold back.
    """

    index: int
    transcript: Transcript
    detokenizer: Detokenizer
    stop: StopFinder
    num_tokens: int = 0
    num_characters: int = 0
    finish_reason: str | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def advance(self, tokens: list[TokenOut]) -> Delta:
        """Turn tokens into text until the choice ends. Raise GenerationFailed or, for its grammar, GrammarFailed."""
        delta = Delta(index=self.index)
        params = self.transcript.params
        for token in tokens:
            finish = None if token.finish_reason is None else _finish_of(token.finish_reason)
            if finish == "error":
                # Only a failed grammar comes with a token.
                if params.grammar and token.token_id is not None:
                    raise GrammarFailed(self.num_tokens + 1)
                raise GenerationFailed(token.error or "The generation was aborted.")
            delta.embedding = token.embedding
            piece = ""
            if token.token_id is not None:
                self.num_tokens += 1
                delta.token_ids.append(token.token_id)
                delta.text_offsets.append(self.num_characters)
                delta.logprobs.append(token.logprobs)
                # A token that ends the generation is no text, unless its text was asked for. The last token of an
                # answer that its grammar ended is text.
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
    """Return OpenAI's word for the reason that ended a generation."""
    match reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.CANCELLED | FinishReason.ERROR:
            return "error"
