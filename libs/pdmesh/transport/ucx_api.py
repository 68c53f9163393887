"""What of ucxx (the Python binding of UCX) is used here, loaded when a transport opens and not before."""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

from pdmesh.errors import ConfigError

#: Before each piece: magic, payload bytes, number. UCX does not tell how long a received message is.
PREFIX = struct.Struct("<4sIQ")
PIECE_MAGIC = b"pdP1"


class Offer(NamedTuple):
    """A message instead of a piece, inside a host: the piece lies there, prefix and header first, and may be read.

    The return address follows it.
    """

    magic: bytes
    return_bytes: int
    number: int
    num_bytes: int
    pid: int
    address: int


OFFER = struct.Struct("<4sIQIIQ")
OFFER_MAGIC = b"pdO1"


class Answer(NamedTuple):
    """What becomes of an offer: the sender may reuse the piece's buffer, or must send the piece itself."""

    magic: bytes
    taken: bool
    number: int


ANSWER = struct.Struct("<4s?3xQ")
ANSWER_MAGIC = b"pdA1"

#: Messages from so many bytes on wait in the sender's memory until the receiver takes them: pieces, not offers.
RENDEZVOUS_BYTES = 4096

#: Receives match any tag of their kind, so that a stranger's message cannot pile up unmatched.
TAG = 0x70646D657368
ANSWER_TAG = 1 << 63 | TAG
_KIND = 1 << 63


class UcxApi(NamedTuple):
    """An open UCX worker and the names needed with it; ``Any`` because ucxx has no types."""

    ucx: Any
    array: Any
    context: Any
    worker: Any
    tag: Any
    answer_tag: Any
    any_tag: Any  # of the same kind
    reads_memory: bool

    def error_of(self, request: Any) -> str | None:
        """How a completed request failed, if it did."""
        try:
            request.check_error()
        except self.ucx.UCXError as error:
            return str(error)
        return None


def open_ucx(tls: str | None, net_devices: str) -> UcxApi:
    """A UCX context and worker. Raises ConfigError.

    UCX listens on the devices it is given, and on all of them if it is given none; ``net_devices`` keeps it from that.
    A UCX_NET_DEVICES in the environment is the operator's own word and stands.
    """
    # Read by UCX when it is loaded. What goes wrong reaches us as an exception, and is logged by us.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    for setting in ("UCX_LOG_LEVEL", "UCXX_LOG_LEVEL"):
        os.environ.setdefault(setting, "fatal")
    try:
        import ucxx._lib.libucxx as ucx  # type: ignore[import-untyped]
        from ucxx._lib.arr import Array  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"transfer.transport is ucx, but ucxx cannot be loaded ({error})") from error
    options = {"RNDV_THRESH": str(RENDEZVOUS_BYTES)}
    if "UCX_NET_DEVICES" not in os.environ:
        options["NET_DEVICES"] = net_devices
    tls = tls or os.environ.get("UCX_TLS", "all")
    # UCX's own way through shared memory does not survive the death of a peer: see `pdmesh.transport.reading`.
    options["TLS"] = "^sm" if tls == "all" else tls
    try:
        context = ucx.UCXContext(options, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
    except ucx.UCXError as error:
        raise ConfigError(
            f"UCX cannot start with transfer.ucx_tls = {tls} and devices "
            f"{os.environ.get('UCX_NET_DEVICES', net_devices)}: {error}"
        ) from error
    return UcxApi(
        ucx=ucx,
        array=Array,
        context=context,
        worker=worker,
        tag=ucx.UCXXTag(TAG),
        answer_tag=ucx.UCXXTag(ANSWER_TAG),
        any_tag=ucx.UCXXTagMask(_KIND),
        reads_memory=names_shared_memory(tls),
    )


def names_shared_memory(tls: str) -> bool:
    """Whether a UCX_TLS setting allows shared memory: then pieces are read where they lie."""
    names = tls.removeprefix("^").split(",")
    named = any(name.strip() in {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma"} for name in names)
    return named != tls.startswith("^")
