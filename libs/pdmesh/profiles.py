"""Profile files, which `pdmesh profile` writes and `scheduler.profile` names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from pdmesh.errors import ConfigError
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh.policy.latency_profile import Profile, Subject, built_in_profile

FORMAT = "pdmesh-profile-2"

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0)]
_Coefficient = Annotated[float, msgspec.Meta(ge=0)]


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file, a JSON object, with the coefficients of `LinearLatencyModel`, in seconds.

    A file of an earlier pdmesh has no ``weights_s``, and is read as a sum.
    `measured_at` is ISO 8601. The model was fitted to `num_steps` steps. The errors are relative, on `num_held_out`
    further steps.
    """

    format: str
    subject: Subject
    num_threads: int
    measured_at: str
    pdmesh_version: str
    num_steps: _Count
    num_held_out: _Count
    mean_error: _Share
    worst_error: _Share
    coefficients: dict[str, _Coefficient]


def save_profile(path: Path, content: ProfileFile) -> None:
    """Write a profile. Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error


def load_profile(name: str) -> Profile:
    """Return a built-in profile, or the one in a file. Raises ConfigError that names the fault."""
    path = Path(name).expanduser()
    if name in PROFILES or not path.exists():
        return built_in_profile(name)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=ProfileFile)
        if content.format != FORMAT:
            raise ConfigError(f"{name} is a profile of format {content.format!r}, this pdmesh reads {FORMAT!r}")
        latency = _model(content)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {name}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{name} is not a latency profile: {error}; `pdmesh profile` writes one") from error
    return Profile(name=name, subject=content.subject, latency=latency)


def _model(content: ProfileFile) -> LinearLatencyModel:
    """Return the model with the file's coefficients. Raises ValueError for wrong or impossible ones."""
    coefficients = content.coefficients
    wanted = list(LinearLatencyModel.__slots__)
    if {*wanted} - {"weights_s"} != {*coefficients} - {"weights_s"}:
        raise ValueError(f"coefficients are {', '.join(coefficients) or 'missing'}: must be {', '.join(wanted)}")
    for name, value in coefficients.items():
        if not math.isfinite(value):
            raise ValueError(f"the coefficient {name} is {value}")
    if not coefficients["a_s"] + coefficients["b_s"] > 0:
        raise ValueError("a prompt would take no time: a_s and b_s are 0")
    return LinearLatencyModel(**coefficients)
