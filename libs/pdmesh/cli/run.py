"""`pdmesh run`: chat with a model that a mesh in the background serves."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import typer

from pdmesh.cli.chat import run_chat
from pdmesh.cli.http import Target
from pdmesh.cli.options import ChatOptions
from pdmesh.cli.state_folder import DEFAULT_NAME, MeshRecord, StateFolder
from pdmesh.config import MeshConfig
from pdmesh.errors import ConfigError


def run_model(config: MeshConfig, state: StateFolder, message: str | None) -> int:
    """Chat, or print the answer to ``message``, and return the exit code.

    Start a mesh if none of that name runs, and leave it running; if it does not start, return its supervisor's exit
    code. Raises ConfigError if the mesh serves another model, PdmeshError as `run_chat` does.
    """
    record = state.read()
    if record is None:
        from pdmesh.cli.plan import make_pools
        from pdmesh.cli.up import up_detached

        say = functools.partial(typer.echo, err=True)
        code = up_detached(config, make_pools(None, None, 0), state, os.environ, say=say)
        if code:
            return code
        record = state.read()
    elif config.model is not None and not _serves(record, config):
        named = "" if state.name == DEFAULT_NAME else f" --name {state.name}"
        raise ConfigError(
            f"mesh {state.name!r} serves {record.model}: stop it with `pdmesh stop{named}`, or give another --name and "
            "--port"
        )
    options = ChatOptions(model=None if record is None else record.model)
    return run_chat(Target(config, state), options, message)


def _serves(record: MeshRecord, config: MeshConfig) -> bool:
    """Return whether a running mesh serves the configured model.

    The model's files must be the same, or, if there are none here, the name. Directories of several models may have the
    same name.
    """
    given, served = str(config.model), str(record.config.get("model"))
    if Path(given).expanduser().exists():
        from pdmesh.engine.files import resolve_model

        return resolve_model(given).resolve() == Path(served).resolve()
    return bool({given, config.worker.served_model_name} & {record.model, served})
