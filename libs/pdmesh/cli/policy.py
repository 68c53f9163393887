"""`pdmesh policy list|get|set`: the policy bundle of a running mesh."""

from __future__ import annotations

import anyio
import msgspec
import typer

from pdmesh.cli.admin import target
from pdmesh.cli.options import Output
from pdmesh.cli.state import StateFolder
from pdmesh.config import MeshConfig
from pdmesh.errors import ProtocolError
from pdmesh.wire.admin import ask_scheduler
from pdmesh.wire.messages import GetPolicies, Policies, SetPolicy


def list_policies(config: MeshConfig, state: StateFolder, output: Output) -> None:
    answer = _ask(config, state, None)
    if output is Output.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
        return
    for bundle in answer.bundles:
        typer.echo(f"{'*' if bundle == answer.bundle else ' '} {bundle}")


def get_policy(config: MeshConfig, state: StateFolder) -> None:
    typer.echo(_ask(config, state, None).bundle)


def set_policy(config: MeshConfig, state: StateFolder, bundle: str) -> None:
    """Switch, while serving. Raises PdmeshError if the scheduler has no such bundle."""
    typer.echo(f"pdmesh: policy {_ask(config, state, bundle).bundle}")


def _ask(config: MeshConfig, state: StateFolder, bundle: str | None) -> Policies:
    _, address, security = target(config, state)
    question = GetPolicies() if bundle is None else SetPolicy(bundle=bundle)
    answer = anyio.run(ask_scheduler, address, security, question)
    if not isinstance(answer, Policies):
        raise ProtocolError("the scheduler answered another question")
    return answer
