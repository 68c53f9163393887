"""`pdmesh doctor --mesh`: checks that a running mesh's instances reach each other and the gateways, with remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import typer

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.tables import terminal_width, wrapped
from pdmesh.wire import messages

#: Largest difference of clocks: logs and traces of two hosts are read side by side.
MAX_OFFSET_S = 1.0

#: Remaining validity below which a certificate is reported.
MIN_CERTIFICATE_S = 7 * 86400.0

_ADVICE = {
    "kv": "let the two hosts reach each other on UCX's ports (UCX_TCP_PORT_RANGE), and check transfer.ucx_net_devices, "
    "and that both have the same security.mesh_token",
    "tokens": "let that host reach the gateway's token port, or set gateway.token_address to one that it reaches",
    "trust": "give both a certificate of the same authority (security.tls_ca), made for the address that is dialled",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, with its remedy."""

    where: str
    problem: str
    advice: str


def run_mesh_doctor(asked: Asked) -> int:
    """Print the faults of a mesh. Return 1 if there are any, else 0. Raises PdmeshError if no mesh can be asked."""
    answer = asked.answer(messages.CheckMesh(), messages.MeshChecked)
    found = list(findings(answer, time.time()))
    if asked.output is Output.JSON:
        typer.echo(msgspec.json.encode({"checked": answer, "findings": found}).decode())
    else:
        print_findings(answer, found)
    return 1 if found else 0


def findings(answer: messages.MeshChecked, now: float) -> Iterator[Finding]:
    """Yield all faults. ``now`` is Unix time."""
    yield from _certificate("scheduler", answer.certificate_expires_at, now)
    for row in answer.instances:
        where, checked = f"{row.instance_id} on {row.host}", row.checked
        if checked is None:
            yield Finding(
                where=where,
                problem="it did not answer",
                advice="see its log: it hangs, or its connection broke",
            )
            continue
        for problem in checked.problems:
            kind = problem.kind.partition(" ")[0]
            advice = _ADVICE["trust" if "trust" in problem.reason else kind]
            yield Finding(where=where, problem=f"{problem.kind} {problem.peer}: {problem.reason}", advice=advice)
        if checked.version != answer.version:
            yield Finding(
                where=where,
                problem=f"version {checked.version}, the scheduler has {answer.version}",
                advice="install the same version of pdmesh everywhere",
            )
        if abs(row.clock_offset_s) > MAX_OFFSET_S:
            yield Finding(
                where=where,
                problem=f"its clock is {row.clock_offset_s:+.1f} s off the scheduler's",
                advice="set both clocks by NTP: times in logs and traces do not agree",
            )
        yield from _certificate(where, checked.certificate_expires_at, now)


def _certificate(where: str, expires_at: float | None, now: float) -> Iterator[Finding]:
    if expires_at is None or expires_at - now >= MIN_CERTIFICATE_S:
        return
    days = (expires_at - now) / 86400
    problem = f"its certificate ends in {days:.1f} days" if days > 0 else f"its certificate ended {-days:.1f} days ago"
    advice = "replace security.tls_cert and tls_key: services read them again by themselves"
    yield Finding(where=where, problem=problem, advice=advice)


def print_findings(answer: messages.MeshChecked, found: list[Finding]) -> None:
    """Print a line for each finding. Findings with one remedy precede it."""
    num_pairs = len(answer.instances) * (len(answer.instances) - 1)
    verdict = f"{len(found)} problem{'s' if len(found) > 1 else ''}" if found else "all well"
    typer.echo(
        f"{len(answer.instances)} instances, {num_pairs} KV paths, "
        f"{len(answer.instances) * len(answer.gateways)} token paths: {verdict}"
    )
    width = terminal_width()
    by_advice: dict[str, list[Finding]] = {}
    for each in found:
        by_advice.setdefault(each.advice, []).append(each)
    for advice, alike in by_advice.items():
        for text, indent in [*((f"{each.where}: {each.problem}", "") for each in alike), (f"→ {advice}", "  ")]:
            typer.echo(indent + f"\n{indent}  ".join(wrapped(text, width - len(indent) - 2)))
