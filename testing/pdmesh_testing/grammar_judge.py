"""A judge of grammars in the test's own process."""

from __future__ import annotations

from typing import Any

from pdmesh.grammars import Grammars, schema_problem
from pdmesh_gateway.gbnf import Converted, converted
from pdmesh_gateway.grammar_process import GrammarProcess
from pdmesh_gateway.schemas import Obeyed, obeyed


class InProcessJudge(GrammarProcess):
    """Judges without a process, and so without limits."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def prepare(self) -> None:
        """Do nothing: the grammars are loaded."""

    def problem(self, grammar: str) -> str | None:
        return self._grammars.problem(grammar)

    def obeyed(self, schema: Any) -> Obeyed | None:
        return obeyed(schema, schema_problem)

    def converted(self, text: str) -> Converted | None:
        return converted(text)

    def give_up(self) -> None:
        """Do nothing: a judgement in this process cannot be ended."""
