"""Generator of agent sessions in the format `weka_trace`, with the medians that vLLM published of AgentX.

    python -m pdmesh_lab.weka_generator FOLDER [--sessions 60] [--scale 32] [--seed 0]

Published medians: 43 turns, 142K tokens of a prompt, 444 of an answer; 44 % of the sessions have subagents, with 4 of
them. Everything else is assumed: log-normal spreads, a system prompt of 18K tokens, tool results of 3K, a compaction
at 320K, and a user's pause before 12 % of the turns. Half of the subagents begin with their parent's context. `--scale`
divides all lengths, and leaves turns and pauses as they are.
"""

from __future__ import annotations

import argparse
import random
from itertools import count
from pathlib import Path

import msgspec

from pdmesh_lab.weka_traces import WekaRequest, WekaStreamed, WekaSubagent, WekaTrace

MEDIAN_TURNS, SUBAGENTS_SHARE, MEDIAN_SUBAGENTS, MEDIAN_SUBAGENT_TURNS = 43, 0.44, 4, 8
SYSTEM_TOKENS, SUBAGENT_SYSTEM_TOKENS, MAX_CONTEXT_TOKENS, SUMMARY_TOKENS = 18_000, 6_000, 320_000, 8_000
MEDIAN_RESULT_TOKENS, MAX_RESULT_TOKENS, MEDIAN_ANSWER_TOKENS = 3_000, 40_000, 444
USER_SHARE, USER_PAUSE_S, MEDIAN_TOOL_S = 0.12, 10.0, 2.0

#: Assumed speed of the recorded service, which sets the times of the trace.
_TTFT_S, _TOKENS_PER_S = 1.0, 60.0

_MODEL = "generated"


class _Session:
    """One session while it is drawn."""

    def __init__(self, rng: random.Random, scale: int, block_size: int) -> None:
        self._rng = rng
        self._scale = scale
        self._block_size = block_size
        self._ids = count()
        self._subagent_head: list[int] = []

    def draw(self, name: str) -> WekaTrace:
        context = self._blocks(SYSTEM_TOKENS)
        num_turns = self._around(MEDIAN_TURNS, 0.6)
        has_subagents = self._rng.random() < SUBAGENTS_SHARE
        num_subagents = self._around(MEDIAN_SUBAGENTS, 0.7) if has_subagents else 0
        spawns = [self._rng.randrange(max(1, num_turns - 1)) for _ in range(num_subagents)]
        requests: list[WekaRequest | WekaStreamed | WekaSubagent] = []
        now_s = 0.0
        for turn in range(num_turns):
            request, context = self._turn(context, now_s)
            now_s = _end_s(request)
            requests.append(request)
            subagents = [self._subagent(context, now_s) for _ in range(spawns.count(turn))]
            requests += subagents
            now_s = max([now_s, *(_end_s(each.requests[-1]) for each in subagents)])
            now_s += self._pause_s()
        return WekaTrace(
            id=name, models=[_MODEL], block_size=self._block_size, hash_id_scope="local", requests=requests
        )

    def _subagent(self, parent: list[int], began_s: float) -> WekaSubagent:
        if not self._subagent_head:
            self._subagent_head = self._blocks(SUBAGENT_SYSTEM_TOKENS)
        context = [*(parent if self._rng.random() < 0.5 else self._subagent_head)]
        requests: list[WekaRequest | WekaStreamed] = []
        now_s = began_s
        for _ in range(self._around(MEDIAN_SUBAGENT_TURNS, 0.6)):
            request, context = self._turn(context, now_s)
            requests.append(request)
            now_s = _end_s(request) + self._pause_s()
        return WekaSubagent(
            t=began_s,
            agent_id=f"agent-{next(self._ids)}",
            subagent_type="generated",
            status="completed",
            requests=requests,
            models=[_MODEL],
            duration_ms=int(1000 * (_end_s(requests[-1]) - began_s)),
        )

    def _turn(self, context: list[int], at_s: float) -> tuple[WekaStreamed, list[int]]:
        """Return a request behind a context, and the context with the request and its answer.

        If the context is too long, only its head and a summary are left.
        """
        if len(context) * self._block_size * self._scale > MAX_CONTEXT_TOKENS:
            context = context[: self._num_blocks(SYSTEM_TOKENS)] + self._blocks(SUMMARY_TOKENS)
        prompt = context + self._blocks(min(MAX_RESULT_TOKENS, self._around(MEDIAN_RESULT_TOKENS, 1.2)))
        num_answer_tokens = self._around(MEDIAN_ANSWER_TOKENS, 1.0)
        request = WekaStreamed(
            t=at_s,
            model=_MODEL,
            num_prompt_tokens=len(prompt) * self._block_size,
            num_output_tokens=max(1, num_answer_tokens // self._scale),
            hash_ids=prompt,
            stop="tool_use",
            api_time=_TTFT_S + num_answer_tokens / _TOKENS_PER_S,
        )
        return request, prompt + self._blocks(num_answer_tokens)

    def _pause_s(self) -> float:
        if self._rng.random() < USER_SHARE:
            return USER_PAUSE_S
        return min(USER_PAUSE_S, MEDIAN_TOOL_S * self._rng.lognormvariate(0.0, 1.0))

    def _blocks(self, num_tokens: int) -> list[int]:
        """Return new blocks for a number of tokens before scaling."""
        return [next(self._ids) for _ in range(self._num_blocks(num_tokens))]

    def _num_blocks(self, num_tokens: int) -> int:
        return max(1, round(num_tokens / self._scale / self._block_size))

    def _around(self, median: float, sigma: float) -> int:
        return max(1, round(median * self._rng.lognormvariate(0.0, sigma)))


def _end_s(request: WekaRequest) -> float:
    return request.t + (request.api_time or 0.0)


def draw_session(number: int, *, seed: int, scale: int, block_size: int) -> WekaTrace:
    """Draw a session, which depends on its number and the other arguments only."""
    return _Session(random.Random(f"{seed} {number}"), scale, block_size).draw(f"session-{number:04d}")


def main() -> None:
    """Write the sessions that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="is created, and gets a file for each session")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths in tokens")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block that `hash_ids` name")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.sessions):
        trace = draw_session(number, seed=options.seed, scale=options.scale, block_size=options.block_size)
        Path(options.folder, f"{trace.id}.json").write_bytes(msgspec.json.encode(trace))


if __name__ == "__main__":
    main()
