"""The parts of ucxx, the Python binding of UCX, that are used here. They are loaded only when a transport opens."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any, NamedTuple

from pdmesh.config import TransferConfig
from pdmesh.errors import ConfigError

#: Messages of this size or more stay in the sender's memory until the receiver takes them. Links that notice a lost
#: peer cannot use UCX's schemes that write into the receiver's memory, such as put_zcopy: with one of them UCX sends
#: eagerly, and a paused receiver counts as having taken the piece.
RENDEZVOUS_BYTES = 4096

#: The tag of all messages. Receives match any tag, so that foreign messages cannot pile up unmatched.
TAG = 0x70646D657368


class UcxApi(NamedTuple):
    """An open UCX worker and the names needed with it; ``Any`` because ucxx has no types.

    ``transports`` names the network transports that UCX may use, such as "tcp" or "rc_mlx5/tcp".
    """

    ucx: Any
    array: Any
    context: Any
    worker: Any
    tag: Any
    any_tag: Any
    transports: str

    def error_of(self, request: Any) -> str | None:
        """Return why a completed request failed; None if it succeeded."""
        try:
            request.check_error()
        except self.ucx.UCXError as error:
            return str(error)
        return None


def ucx_devices(config: TransferConfig) -> str:
    """Return the network devices that UCX listens on; "" if KV stays inside the host and UCX is not opened.

    UCX_NET_DEVICES in the environment takes precedence over the setting. If only transports are named, by the setting
    or by UCX_TLS in the environment, the device is the loopback one.
    """
    devices = os.environ.get("UCX_NET_DEVICES") or config.ucx_net_devices
    return devices or ("lo" if ucx_tls(config) != "all" else "")


def ucx_tls(config: TransferConfig) -> str:
    """Return the transports that UCX may use: from the setting, else from UCX_TLS in the environment, else all."""
    return config.ucx_tls or os.environ.get("UCX_TLS") or "all"


def check_ucx_installed() -> None:
    """Raise ConfigError if UCX is not installed, before a model is loaded for minutes."""
    if importlib.util.find_spec("ucxx") is None:
        raise ConfigError("KV to other hosts needs UCX, which is not installed: run `pip install 'pdmesh[ucx]'`")


def open_ucx(config: TransferConfig) -> UcxApi:
    """Open a UCX context and a worker that listens on `ucx_devices`.

    Raise ConfigError if UCX is missing or cannot start.
    """
    # UCX reads these when it is loaded. Its errors are raised here as exceptions, which pdmesh logs.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    for setting in ("UCX_LOG_LEVEL", "UCXX_LOG_LEVEL"):
        os.environ.setdefault(setting, "fatal")
    try:
        import ucxx._lib.libucxx as ucx  # type: ignore[import-untyped]
        from ucxx._lib.arr import Array  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            f"KV to other hosts needs UCX, which cannot be loaded ({error}): run `pip install 'pdmesh[ucx]'`"
        ) from error
    tls, devices = ucx_tls(config), ucx_devices(config)
    # UCX's shared-memory transports do not survive the death of a peer: see `pdmesh.transport.reading`.
    options = {
        "RNDV_THRESH": str(RENDEZVOUS_BYTES),
        "NET_DEVICES": devices,
        "TLS": "^sm" if tls == "all" else tls,
        # With UCX's default of 64 KiB, a piece of 64 KiB takes two messages, and a GB a tenth more CPU.
        "TCP_RX_SEG_SIZE": os.environ.get("UCX_TCP_RX_SEG_SIZE") or "256K",
        # Otherwise connecting blocks the event loop, for minutes if a host does not answer.
        "TCP_CONN_NB": "y",
    }
    try:
        context = ucx.UCXContext(options, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
    except ucx.UCXError as error:
        raise ConfigError(f"UCX cannot start with transfer.ucx_tls = {tls} and devices {devices}: {error}") from error
    return UcxApi(
        ucx=ucx,
        array=Array,
        context=context,
        worker=worker,
        tag=ucx.UCXXTag(TAG),
        any_tag=ucx.UCXXTagMask(0),
        transports=_transports_in(context.info),
    )


def _transports_in(info: str) -> str:
    """Return the names of the network transports in UCX's description of a context."""
    names = re.findall(r"^#\s+resource .* (\w+)/", info, re.MULTILINE)
    return "/".join(dict.fromkeys(name for name in names if name != "self"))


def names_shared_memory(tls: str) -> bool:
    """Whether a UCX_TLS setting allows shared memory, so that pieces are read from the sender's memory."""
    names = tls.removeprefix("^").split(",")
    named = any(name.strip() in {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma"} for name in names)
    return named != tls.startswith("^")
