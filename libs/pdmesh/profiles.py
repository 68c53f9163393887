"""Profile files: what `pdmesh profile` writes and `scheduler.profile` names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from pdmesh.errors import ConfigError
from pdmesh.policy.latency import PROFILES, LinearLatencyModel
from pdmesh.policy.latency_profile import Profile, Subject, built_in_profile

FORMAT = "pdmesh-profile-2"

#: Before steps of chunks and decodes had terms of their own. Such a file is read: they cost what their parts do.
_FORMAT_1, _TERMS_SINCE_1 = "pdmesh-profile-1", ("mixed_a_s", "interference_s")

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0)]
_Coefficient = Annotated[float, msgspec.Meta(ge=0)]


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file, a JSON object. Coefficients are those of `LinearLatencyModel`, in seconds."""

    format: str
    subject: Subject
    num_threads: int
    measured_at: str  # ISO 8601
    pdmesh_version: str
    num_steps: _Count  # fitted to
    num_held_out: _Count  # measured beside them; the errors are of these, relative
    mean_error: _Share
    worst_error: _Share
    coefficients: dict[str, _Coefficient]


def save_profile(path: Path, content: ProfileFile) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error


def load_profile(name: str) -> Profile:
    """A built-in profile, or the one in a file. Raises ConfigError that says what is wrong with it."""
    path = Path(name).expanduser()
    if name in PROFILES or not path.exists():
        return built_in_profile(name)
    try:
        content = msgspec.json.decode(path.read_bytes(), type=ProfileFile)
        if content.format not in (FORMAT, _FORMAT_1):
            raise ConfigError(f"{name} is a profile of format {content.format!r}, this pdmesh reads {FORMAT!r}")
        latency = _model(content)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {name}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{name} is not a latency profile: {error}; `pdmesh profile` writes one") from error
    return Profile(name=name, subject=content.subject, latency=latency)


def parse_latency(text: str) -> LinearLatencyModel:
    """A profile by its name, or terms as ``name=value,name=value``, in seconds; those that are not given are 0.

    Raises ConfigError.
    """
    if "=" not in text:
        return load_profile(text).latency
    terms: dict[str, float] = {"a_s": 0.0, "b_s": 0.0, "c_s": 0.0, "d_s": 0.0}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in LinearLatencyModel.__slots__:
            raise ConfigError(
                f"{name!r} is not a term of a latency model: use {', '.join(LinearLatencyModel.__slots__)}"
            )
        try:
            terms[name] = float(value)
        except ValueError:
            raise ConfigError(f"the term {name} of a latency model is {value!r}: give seconds") from None
        if not (math.isfinite(terms[name]) and terms[name] >= 0):
            raise ConfigError(f"the term {name} of a latency model is {value}: give seconds, 0 or more")
    return LinearLatencyModel(**terms)


def _model(content: ProfileFile) -> LinearLatencyModel:
    """Raises ValueError."""
    coefficients = content.coefficients
    wanted = list(LinearLatencyModel.__slots__)
    if content.format == _FORMAT_1:
        wanted = [name for name in wanted if name not in _TERMS_SINCE_1]
    if sorted(coefficients) != sorted(wanted):
        raise ValueError(f"coefficients are {', '.join(coefficients) or 'missing'}: must be {', '.join(wanted)}")
    for name, value in coefficients.items():
        if not math.isfinite(value):
            raise ValueError(f"the coefficient {name} is {value}")
    if not coefficients["a_s"] + coefficients["b_s"] > 0:
        raise ValueError("a prompt would take no time: a_s and b_s are 0")
    return LinearLatencyModel(**coefficients)
