"""A process that compiles clients' grammars within limits: it answers each JSON line on stdin by a JSON line on stdout.

* A string is a grammar; the answer is its problem or null.
* An array of one is a schema; the answer is an `Obeyed`.
* An object has the ``text`` of a grammar in GBNF or Lark; the answer is a `Converted`.

The process is separate because the library's own limits do not cover all grammars: some schemas never finish, or take
all memory and kill the process. The tokenizer is read once.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from pdmesh.errors import InstanceUnavailable
from pdmesh.grammars import MAX_GRAMMAR_BYTES, Grammars, schema_problem
from pdmesh_gateway.gbnf import Converted, converted
from pdmesh_gateway.schemas import Obeyed, obeyed

CPU_LIMIT_S = 2
MEMORY_LIMIT_BYTES = 2 * 1024**3
#: Limit of an `Obeyed`, because gateways cache them. Its schema is useless beyond `MAX_GRAMMAR_BYTES`; the rest is room
#: for paths.
MAX_ANSWER_BYTES = 4 * MAX_GRAMMAR_BYTES
#: Gives streams on the same cores precedence.
NICENESS = 5
_ANYTHING = json.dumps({"grammars": [{"json_schema": {}}]})
TOO_MUCH = "it takes too much time or memory."


class GrammarProcess:
    """Client of the process that checks grammars for a model's tokenizer, one at a time.

    The methods block: use threads.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._command = [sys.executable, "-m", "pdmesh_gateway.grammar_process", str(directory), str(vocab_size)]
        self._command += map(str, eos_token_ids)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # A process that was killed and may not have ended yet.
        self._given_up: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the process if it does not run, and wait until it has read the tokenizer.

        Raises InstanceUnavailable if the process ends instead.
        """
        with self._lock:
            if self._process is not None:
                if self._process is not self._given_up and self._process.poll() is None:
                    return
                self._end(self._process)
            process = self._process = subprocess.Popen(  # does not fork on Linux
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert process.stdout is not None
            if not process.stdout.readline():
                self._end(process)
                raise InstanceUnavailable("the process that compiles grammars ended at its start")

    def problem(self, grammar: str) -> str | None:
        """Return the reason why a grammar cannot be obeyed, in a sentence; None if it can. Call `prepare` first."""
        answer = self._ask(grammar)
        return TOO_MUCH if answer is None else msgspec.json.decode(answer, type=str | None)

    def obeyed(self, schema: Any) -> Obeyed | None:
        """Return the part of a schema that can be obeyed; None if it takes too much time or memory, or is too large."""
        answer = self._ask([schema])
        if answer is None or len(answer) > MAX_ANSWER_BYTES:
            return None
        return msgspec.json.decode(answer, type=Obeyed)

    def converted(self, text: str) -> Converted | None:
        """Return a grammar from GBNF or Lark; None if this takes too much time or memory."""
        answer = self._ask({"text": text})
        return None if answer is None else msgspec.json.decode(answer, type=Converted)

    def _ask(self, question: Any) -> bytes | None:
        """Return the answer to a question; None if the process does not run or ends instead of answering."""
        with self._lock:
            process = self._process
            if process is None:
                return None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            if not answer:
                self._end(process)
                return None
            return answer

    def give_up(self) -> None:
        """Kill the process, so that a question under way returns soon."""
        process = self._given_up = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        self.give_up()
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


def main() -> int:
    """Answer questions until stdin ends, and return the exit code. The kernel kills the process at the limits."""
    directory, vocab_size, *eos_token_ids = sys.argv[1:]
    grammars = Grammars(Path(directory), vocab_size=int(vocab_size), eos_token_ids=list(map(int, eos_token_ids)))
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # Reads the tokenizer.
    grammars.problem(_ANYTHING)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        most_s = int(time.process_time()) + 1 + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        question = json.loads(line)
        answer: Obeyed | Converted | str | None
        if isinstance(question, str):
            answer = grammars.problem(question)
        elif isinstance(question, dict):
            answer = converted(question["text"])
        else:
            answer = obeyed(question[0], schema_problem)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
