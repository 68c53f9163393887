"""Prompts that are not conversations: texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdmesh.errors import RequestRejected
from pdmesh_gateway.sampling import Truncation, truncation_of
from pdmesh_gateway.serving import Serving

#: One or several: a text, texts, token ids, or lists of these.
Prompts = str | list[str | int | list[int]]


def prompts_of(given: Prompts | None, *, what: str) -> list[str | list[int]]:
    """Return the single prompts of a field. ``what`` is the field's name.

    Raise RequestRejected if the field is missing or malformed.
    """
    if given is None:
        raise RequestRejected(f"Missing required parameter: '{what}'.", param=what, code="missing_required_parameter")
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    if all(isinstance(item, str | list) for item in given):
        return [item for item in given if isinstance(item, str | list)]
    raise RequestRejected(
        f"Invalid value for `{what}`: it must be a string or a list of strings, token ids or token id lists.",
        param=what,
        code="invalid_type",
    )


class HasPrompts(Protocol):
    """Request with settings for tokenizing and cutting its prompts."""

    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: str | None


async def prompt_ids_of(
    serving: Serving, request: HasPrompts, prompts: Sequence[str | list[int]], *, what: str
) -> list[Sequence[int]]:
    """Return the token ids of each prompt, checked and cut. Raises RequestRejected."""
    truncation = truncation_of(request.truncate_prompt_tokens, request.truncation_side)
    with_special_tokens = request.add_special_tokens is not False
    return [
        await prompt_ids(serving, prompt, what=what, add_special_tokens=with_special_tokens, truncation=truncation)
        for prompt in prompts
    ]


async def prompt_ids(
    serving: Serving,
    prompt: str | list[int],
    *,
    what: str,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
) -> Sequence[int]:
    """Return a prompt's token ids, checked and cut. Raises RequestRejected."""
    token_ids: Sequence[int] = prompt if isinstance(prompt, list) else ()
    if isinstance(prompt, str) and prompt:
        token_ids = await serving.encode(prompt, add_special_tokens=add_special_tokens, what=what)
    return serving.check_prompt(token_ids, what=what, truncation=truncation)
