"""`pdmesh policy list|get|set`: the policy bundle of a running mesh, and its batching mode."""

from __future__ import annotations

import anyio
import msgspec
import typer

from pdmesh.cli.admin import target
from pdmesh.cli.options import Output
from pdmesh.cli.state import StateFolder
from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError, ProtocolError
from pdmesh.policy.bundles import BATCHINGS
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetPolicies, Policies, SetBatching, SetPolicy


def list_policies(config: MeshConfig, state: StateFolder, output: Output) -> None:
    answer = _ask(config, state, GetPolicies())
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
        return
    for bundle in answer.bundles:
        typer.echo(f"{'*' if bundle == answer.bundle else ' '} {bundle}")
    typer.echo("batching")
    for batching in answer.batchings:
        typer.echo(f"{'*' if batching == answer.batching else ' '} {batching}")


def get_policy(config: MeshConfig, state: StateFolder) -> None:
    answer = _ask(config, state, GetPolicies())
    typer.echo(f"{answer.bundle}  batching {answer.batching}")


def set_policy(config: MeshConfig, state: StateFolder, name: str, threshold: float | None) -> None:
    """Switch to a bundle or a batching mode, while serving.

    Raises ConfigError for a threshold that has no effect, PdmeshError if the scheduler has nothing of that name.
    """
    if threshold is not None and name != "eb":
        raise ConfigError("--threshold applies to `eb` only: set the policy `eb` with it")
    if name in BATCHINGS:
        answer = _ask(config, state, SetBatching(batching=name, threshold=threshold))
    else:
        answer = _ask(config, state, SetPolicy(bundle=name))
    typer.echo(f"pdmesh: policy {answer.bundle}  batching {answer.batching}")


def _ask(config: MeshConfig, state: StateFolder, question: GetPolicies | SetPolicy | SetBatching) -> Policies:
    _, address, security = target(config, state)
    answer = anyio.run(ask_scheduler, address, security, question)
    if not isinstance(answer, Policies):
        raise ProtocolError("the scheduler sent an unexpected answer")
    return answer
