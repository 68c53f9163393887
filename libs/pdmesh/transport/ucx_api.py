"""What of ucxx (the Python binding of UCX) is used here, loaded when a transport opens and not before."""

from __future__ import annotations

import os
import struct
from typing import Any, NamedTuple

from pdmesh.errors import ConfigError

#: Before each message: magic, payload bytes, zero. UCX does not tell how long a received message is.
PREFIX = struct.Struct("<4sIQ")
PREFIX_MAGIC = b"pdP1"

#: Receives match any tag, so that a stranger's message cannot pile up unmatched.
TAG = 0x70646D657368


class UcxApi(NamedTuple):
    """An open UCX worker and the names needed with it; ``Any`` because ucxx has no types."""

    ucx: Any
    array: Any
    context: Any
    worker: Any
    tag: Any
    any_tag: Any
    shares_memory: bool

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
    options = {"RNDV_THRESH": "0"}
    if "UCX_NET_DEVICES" not in os.environ:
        options["NET_DEVICES"] = net_devices
    if tls is not None:
        options["TLS"] = tls
    try:
        context = ucx.UCXContext(options, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
    except ucx.UCXError as error:
        raise ConfigError(
            f"UCX cannot start with transfer.ucx_tls = {tls or 'its own choice'} and devices "
            f"{os.environ.get('UCX_NET_DEVICES', net_devices)}: {error}"
        ) from error
    return UcxApi(
        ucx=ucx,
        array=Array,
        context=context,
        worker=worker,
        tag=ucx.UCXXTag(TAG),
        any_tag=ucx.UCXXTagMask(0),
        shares_memory=names_shared_memory(str(context.config.get("TLS", "all"))),
    )


def names_shared_memory(tls: str) -> bool:
    """Whether a UCX_TLS setting leaves UCX a shared-memory transport."""
    names = tls.removeprefix("^").split(",")
    named = any(name.strip() in {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma"} for name in names)
    return named != tls.startswith("^")
