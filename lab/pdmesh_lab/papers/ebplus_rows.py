"""Rows of the page's tables for EB+: the figures of the paper, and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from pdmesh_lab.papers.saturation import (
    InstanceSplit,
    Law,
    LoadPart,
    Saturation,
    StepConstants,
    gamma,
    geometric,
    uniform,
)

#: The crossover is the paper's (§1). The other constants are fitted to the first three rows of Table 3, and the H200's
#: cost of a prompt token to the prompts that two prefill GPUs compute in Table 20. Room is what weights leave of 90 %
#: of the memory.
GPUS: Mapping[str, StepConstants] = {
    "RTX PRO 6000": StepConstants(
        decode_step_s=11.5e-3,
        prompt_token_s=4.3e-5,
        decode_token_s=7.8e-5,
        crossover=0.2,
        switch_steps=5.0,
        num_kv_tokens=475_000,
        link_bytes_per_s=50e9,
    ),
    "H200": StepConstants(
        decode_step_s=4.86e-3,
        prompt_token_s=2.7e-5,
        decode_token_s=3.4e-5,
        crossover=0.8,
        switch_steps=5.0,
        num_kv_tokens=750_000,
        link_bytes_per_s=450e9,
    ),
}

RTX, H200 = GPUS

#: Largest difference of thresholds, and of throughputs over another, that counts as equal; a tie of two modes.
WITHIN_SHARE, WITHIN, TIE = 0.05, 0.15, 0.01


def like(theirs: float, ours: float) -> str:
    """Return how a gain compares with the paper's: of the same sign, and of about the same size."""
    if theirs * ours < 0 and max(abs(theirs), abs(ours)) > TIE:
        return "**no**"
    return "yes" if abs((1 + ours) / (1 + theirs) - 1) <= WITHIN else "sign"


# --- thresholds ---

#: Table 10: the best share of idle seats in a sweep, by mean output and seats.
SEATS = (64, 128, 256, 512)
TABLE_10: Mapping[int, Sequence[float]] = {
    64: (0.53, 0.46, 0.40, 0.46),
    128: (0.53, 0.33, 0.33, 0.40),
    192: (0.39, 0.20, 0.13, 0.60),
    256: (0.39, 0.27, 0.27, 0.40),
    320: (0.33, 0.27, 0.33, 0.13),
    384: (0.33, 0.20, 0.13, 0.27),
}

#: The paper's means follow from (3) with this switch, in decode steps. Table 3's first row follows from a smaller one.
SWITCH_OF_TABLE_10 = 17.8

THRESHOLD_HEADS = ("mean output", *(f"N {seats}" for seats in SEATS), "mean", "paper's mean", "like the paper's")


def exclusive(seats: int, part: LoadPart, threshold: float | None = None) -> Saturation:
    """Return the study of exclusive batching with ``seats`` seats; ``threshold`` None: found by the core."""
    costs = replace(GPUS[H200], switch_steps=SWITCH_OF_TABLE_10)
    return Saturation(costs=costs, parts=[part], batching="eb", max_num_seqs=seats, changes={"eb_threshold": threshold})


def saturated(seats: int, prompt: float, output: float, law: Law = geometric, turnovers: int = 8) -> LoadPart:
    """Return a load with twice as many clients as seats, so that a request always waits."""
    number = max(1500, turnovers * seats)
    return LoadPart(num_clients=2 * seats, num_requests=number, prompt=prompt, output=output, law=law)


def thresholds() -> Iterator[Sequence[str]]:
    """Yield the thresholds that `eb` chooses, by mean output and seats."""
    for output, theirs in TABLE_10.items():
        ours = [exclusive(seats, saturated(seats, 128, output)).run().idle_share for seats in SEATS]
        off = abs(fmean(ours) - fmean(theirs))
        verdict = "yes" if off <= WITHIN_SHARE else "**no**"
        yield (str(output), *(f"{share:.2f}" for share in ours), f"{fmean(ours):.3f}", f"{fmean(theirs):.3f}", verdict)


def sweep(seats: int, part: LoadPart, tried: Sequence[float]) -> dict[float, float]:
    """Return tokens a second by threshold."""
    return {share: exclusive(seats, part, share).run().steady_tokens_per_s for share in tried}


#: Table 11: the best share by prompt length, with 128 seats.
TABLE_11 = (0.438, 0.625, 0.562, 0.562)
PROMPT_HEADS = ("mean prompt", "best in a sweep", "chosen by `eb`", "of the best throughput", "paper's best")


def prompt_lengths() -> Iterator[Sequence[str]]:
    """Yield the best threshold in a sweep and the chosen one, by mean prompt."""
    for prompt, theirs in zip((32, 64, 128, 256), TABLE_11, strict=True):
        part = saturated(128, prompt, 64, turnovers=16)
        found = sweep(128, part, [step / 16 for step in range(5, 12)])
        best, chosen = max(found, key=found.__getitem__), exclusive(128, part).run()
        share = chosen.steady_tokens_per_s / found[best]
        yield (str(prompt), f"{best:.3f}", f"{chosen.idle_share:.3f}", f"{share:.3f}", f"{theirs}")


#: Tried thresholds, finer where the best are.
HAZARD_SWEEP = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 0.9)
HAZARD_HEADS = ("outputs", "best", "chosen by `eb`", "of the best throughput", "at 0.1", "0.3", "0.5", "0.7", "0.9")


def hazards() -> Iterator[Sequence[str]]:
    """Yield the best threshold and the throughput at others, by the law of the outputs."""
    laws: dict[str, Law] = {"geometric": geometric, "gamma, shape 2": gamma(2), "gamma, shape 4": gamma(4)}
    for name, law in laws.items():
        part = saturated(256, 140, 280, law)
        found = sweep(256, part, HAZARD_SWEEP)
        best, chosen = max(found, key=found.__getitem__), exclusive(256, part).run()
        at = [f"{found[share] / found[best]:.0%}" for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
        share = chosen.steady_tokens_per_s / found[best]
        yield (name, f"{best:.2f}", f"{chosen.idle_share:.2f}", f"{share:.3f}", *at)


# --- modes ---


class Regime(NamedTuple):
    """A row of Table 3: tokens a second of mixed batching, exclusive batching and EB+, by GPU."""

    name: str
    parts: Sequence[LoadPart]
    theirs: Mapping[str, Sequence[float]]
    is_steady: bool


def chat(clients: int, number: int) -> LoadPart:
    """Lengths like ShareGPT's: two thirds of the tokens are output, with Table 9's spread."""
    return LoadPart(
        num_clients=clients, num_requests=number, prompt=140, output=280, law=gamma(3.35), prompt_law=geometric
    )


def mix(clients: int, number: int, prompt: float, output: float) -> LoadPart:
    """Return a load with uniform lengths."""
    return LoadPart(num_clients=clients, num_requests=number, prompt=prompt, output=output, law=uniform)


REGIMES = (
    Regime("64 clients", [chat(64, 2000)], {RTX: (4928, 4728, 4930), H200: (11584, 10779, 11586)}, True),
    Regime("512 clients", [chat(512, 5000)], {RTX: (8330, 13549, 13510), H200: (27464, 27207, 27460)}, True),
    Regime("2,048 clients", [chat(2048, 10000)], {RTX: (8830, 13179, 13214), H200: (26368, 27198, 27043)}, True),
    Regime(
        "lengths shift",
        [mix(1024, 2000, 128, 1024), mix(1024, 2000, 1024, 128)],
        {RTX: (7025, 9647, 9582), H200: (20396, 20762, 21182)},
        False,
    ),
    Regime(
        "clients shift",
        [chat(64, 500), chat(512, 2000), chat(2048, 4000), chat(64, 500)],
        {RTX: (8364, 10350, 10250), H200: (24251, 23374, 24397)},
        False,
    ),
)

REGIME_HEADS = (
    "load",
    "`eb` over `mb`: paper",
    "ours",
    "like the paper's",
    "`ebplus` over `mb`: paper",
    "ours",
    "like the paper's",
    "time in `eb`",
    "TTFT of `eb`; `ebplus` over `mb`",
)


def regimes(gpu: str) -> Iterator[Sequence[str]]:
    """Yield the gains of exclusive batching and of EB+ over mixed batching, by load."""
    for regime in REGIMES:
        ours = [Saturation(costs=GPUS[gpu], parts=regime.parts, batching=name).run() for name in ("mb", "eb", "ebplus")]
        rates = [each.steady_tokens_per_s if regime.is_steady else each.tokens_per_s for each in ours]
        theirs = regime.theirs[gpu]
        cells = [regime.name]
        for index in (1, 2):
            paper, found = theirs[index] / theirs[0] - 1, rates[index] / rates[0] - 1
            cells += [f"{paper:+.1%}", f"{found:+.1%}", like(paper, found)]
        firsts = [f"{each.ttft_s / ours[0].ttft_s:.2f}" for each in ours[1:]]
        yield (*cells, f"{ours[2].exclusive_share:.0%}", "; ".join(firsts))


# --- pools ---

#: Tables 19 and 20: GPUs, clients, lengths, and tokens a second of EB+ and of the best split, which is named.
POOLS: Mapping[str, Sequence[tuple[int, int, tuple[int, int], float, float, str]]] = {
    RTX: (
        (2, 64, (512, 256), 8691, 8606, "1P+1D"),
        (2, 512, (512, 256), 21710, 16467, "1P+1D"),
        (4, 128, (1024, 128), 26207, 42577, "2P+2D"),
        (4, 256, (1024, 128), 37208, 44892, "2P+2D"),
        (4, 512, (1024, 128), 47322, 43326, "2P+2D"),
        (4, 128, (512, 512), 11063, 12629, "1P+3D"),
        (4, 256, (512, 512), 16870, 19831, "1P+3D"),
        (4, 512, (512, 512), 24037, 25080, "1P+3D"),
        (4, 128, (128, 1024), 7690, 7469, "1P+3D"),
        (4, 256, (128, 1024), 12699, 12176, "1P+3D"),
        (4, 512, (128, 1024), 18396, 17224, "1P+3D"),
    ),
    H200: (
        (2, 64, (512, 256), 26857, 22825, "1P+1D"),
        (2, 512, (512, 256), 45539, 39649, "1P+1D"),
        (4, 128, (1024, 128), 65297, 82400, "2P+2D"),
        (4, 256, (1024, 128), 87268, 77117, "2P+2D"),
        (4, 512, (1024, 128), 105432, 78486, "2P+2D"),
        (4, 128, (512, 512), 28686, 31341, "1P+3D"),
        (4, 256, (512, 512), 43729, 47433, "1P+3D"),
        (4, 512, (512, 512), 60988, 48895, "2P+2D"),
        (4, 128, (128, 1024), 19336, 18861, "1P+3D"),
        (4, 256, (128, 1024), 29763, 29495, "1P+3D"),
        (4, 512, (128, 1024), 46782, 38287, "1P+3D"),
    ),
}

POOL_HEADS = (
    "instances",
    "clients",
    "prompt, output",
    "best split: paper",
    "ours",
    "`ebplus` over the paper's best: paper",
    "ours",
    "like the paper's",
)

#: Requests of a row (F.4).
NUM_REQUESTS = 2000

#: With these, no decode instance computes a prompt, and no prefill instance decodes.
APART = {"prefills_locally": False, "decodes_locally": False}


def pools(gpu: str) -> Iterator[Sequence[str]]:
    """Yield the gain of mixed instances under EB+ over the split into pools that is the paper's best."""
    for number, clients, (prompt, output), mixed, split, name in POOLS[gpu]:
        part = mix(clients, NUM_REQUESTS, prompt, output)
        rates = {
            each: pool_rate(gpu, each, part)
            for each in (
                *(InstanceSplit(size, number - size, 0) for size in range(1, number)),
                InstanceSplit(mixed=number),
            )
        }
        of_mixed = rates.pop(InstanceSplit(mixed=number))
        of_paper = next(each for each in rates if str(each) == name)
        best = max(rates, key=rates.__getitem__)
        theirs, ours = mixed / split - 1, of_mixed / rates[of_paper] - 1
        lengths = f"{prompt:,}, {output:,}"
        found = (f"{theirs:+.0%}", f"{ours:+.0%}", like(theirs, ours))
        yield (str(number), str(clients), lengths, name, str(best), *found)


def pool_rate(gpu: str, counts: InstanceSplit, part: LoadPart) -> float:
    """Return the tokens a second of a mesh whose steps have at most 8,192 prompt tokens."""
    changes = {"max_chunk_tokens": 8192, **(APART if counts.prefill else {})}
    return Saturation(costs=GPUS[gpu], parts=[part], pools=counts, changes=changes).run().steady_tokens_per_s
