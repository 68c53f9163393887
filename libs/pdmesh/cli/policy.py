"""`pdmesh policy list|get|set`: the policy bundle of a running mesh, and its batching mode."""

from __future__ import annotations

import json

import anyio
import typer

from pdmesh.cli.options import Output
from pdmesh.cli.state_folder import StateFolder, scheduler_of
from pdmesh.cli.tables import Column, Table
from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError, ProtocolError
from pdmesh.policy.bundles import ABOUT, ABOUT_BATCHING, BATCHINGS, installed_bundles
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetPolicies, Policies, SetBatching, SetPolicy


def list_policies(config: MeshConfig, state: StateFolder, output: Output) -> None:
    """Print all bundles and batching modes, and which of them a mesh uses, if one runs or is named."""
    bundle, batching = "", ""
    if config.scheduler_address or state.read() is not None:
        answer = _ask(config, state, GetPolicies())
        bundle, batching = answer.bundle, answer.batching
    bundles = {name: ABOUT[name] for name in installed_bundles()}
    if output is Output.JSON:
        known = {"bundles": bundles, "batchings": dict(ABOUT_BATCHING), "bundle": bundle, "batching": batching}
        typer.echo(json.dumps(known, indent=2))
        return
    for title, about, in_use in (("bundle", bundles, bundle), ("batching", ABOUT_BATCHING, batching)):
        table = Table([Column(""), Column(title), Column("")])
        for name, sentence in about.items():
            table.add("*" if name == in_use else "", name, sentence)
        table.show()


def get_policy(config: MeshConfig, state: StateFolder) -> None:
    answer = _ask(config, state, GetPolicies())
    typer.echo(f"{answer.bundle}  batching {answer.batching}")


def set_policy(config: MeshConfig, state: StateFolder, name: str, threshold: float | None) -> None:
    """Switch to a bundle or a batching mode, while serving.

    Raises ConfigError for a threshold that has no effect, PdmeshError if the scheduler has nothing of that name.
    """
    if threshold is not None and name != "eb":
        raise ConfigError("--threshold applies to `eb` only: set the policy `eb` with it")
    before = _ask(config, state, GetPolicies())
    if name in BATCHINGS:
        answer = _ask(config, state, SetBatching(batching=name, threshold=threshold))
    else:
        answer = _ask(config, state, SetPolicy(bundle=name))
    shown = [_changed("policy", before.bundle, answer.bundle), _changed("batching", before.batching, answer.batching)]
    typer.echo(f"pdmesh: {', '.join(shown)}")
    if name not in BATCHINGS and answer.batching != before.batching:
        typer.echo("pdmesh: a policy brings its own batching mode; `pdmesh policy list` explains both")


def _changed(what: str, before: str, now: str) -> str:
    return f"{what} {now}" if before == now else f"{what} {now} (was {before})"


def _ask(config: MeshConfig, state: StateFolder, question: GetPolicies | SetPolicy | SetBatching) -> Policies:
    _, address, security = scheduler_of(config, state)
    answer = anyio.run(ask_scheduler, address, security, question)
    if not isinstance(answer, Policies):
        raise ProtocolError("the scheduler sent an unexpected answer")
    return answer
