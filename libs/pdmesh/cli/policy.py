"""`pdmesh policy list|get|set`: the policy bundle of a running mesh, and its batching mode."""

from __future__ import annotations

import json

import typer

from pdmesh.cli.options import Asked, Output
from pdmesh.cli.tables import Column, Table
from pdmesh.errors import ConfigError
from pdmesh.policy.bundles import ABOUT, ABOUT_BATCHING, BATCHINGS, installed_bundles
from pdmesh.wire.messages import GetPolicies, Policies, SetBatching, SetPolicy


def list_policies(asked: Asked) -> None:
    """Print all bundles and batching modes, and mark the present ones of a mesh if one runs or is named."""
    bundle, batching = "", ""
    if asked.config.scheduler_address or asked.state.read() is not None:
        answer = asked.answer(GetPolicies(), Policies)
        bundle, batching = answer.bundle, answer.batching
    bundles = {name: ABOUT[name] for name in installed_bundles()}
    if asked.output is Output.JSON:
        known = {"bundles": bundles, "batchings": dict(ABOUT_BATCHING), "bundle": bundle, "batching": batching}
        typer.echo(json.dumps(known, indent=2))
        return
    for title, about, in_use in (("bundle", bundles, bundle), ("batching", ABOUT_BATCHING, batching)):
        table = Table([Column(""), Column(title), Column("")])
        for name, sentence in about.items():
            table.add("*" if name == in_use else "", name, sentence)
        table.show()


def get_policy(asked: Asked) -> None:
    answer = asked.answer(GetPolicies(), Policies)
    typer.echo(f"{answer.bundle}  batching {answer.batching}")


def set_policy(asked: Asked, name: str, threshold: float | None) -> None:
    """Switch to a bundle or a batching mode, while serving.

    Raises ConfigError for a threshold without effect, PdmeshError if the scheduler has nothing of that name.
    """
    if threshold is not None and name != "eb":
        raise ConfigError("--threshold applies to `eb` only: set the policy `eb` with it")
    before = asked.answer(GetPolicies(), Policies)
    if name in BATCHINGS:
        answer = asked.answer(SetBatching(batching=name, threshold=threshold), Policies)
    else:
        answer = asked.answer(SetPolicy(bundle=name), Policies)
    shown = [_changed("policy", before.bundle, answer.bundle), _changed("batching", before.batching, answer.batching)]
    typer.echo(f"pdmesh: {', '.join(shown)}")
    if name not in BATCHINGS and answer.batching != before.batching:
        typer.echo("pdmesh: a policy brings its own batching mode; `pdmesh policy list` explains both")


def _changed(what: str, before: str, now: str) -> str:
    return f"{what} {now}" if before == now else f"{what} {now} (was {before})"
