"""gRPC servers and channels of the mesh's services: where they listen, and which peers they trust."""

from __future__ import annotations

import errno
import functools
import hmac
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import grpc
import grpc.aio

from pdmesh.config import SecurityConfig, TransferConfig
from pdmesh.errors import ConfigError
from pdmesh.host import is_loopback
from pdmesh.wire.certificates import CertificateFiles, channel_credentials, server_credentials
from pdmesh.wire.link import GRPC_OPTIONS
from pdmesh.wire.rejected_peers import RejectedPeerKind, RejectedPeers


def check_bind(host: str, security: SecurityConfig, *, what: str, has_key: bool) -> None:
    """Raise ConfigError for a bind beyond loopback without TLS and a key, unless the network is trusted."""
    if is_loopback(host) or security.trusted_network:
        return
    missing = [
        name
        for name, given in (("TLS (security.tls_cert, security.tls_key)", security.tls_cert), ("a key", has_key))
        if not given
    ]
    if missing:
        raise ConfigError(
            f"{what} would listen on {host}, outside this machine without {' and '.join(missing)}: "
            "bind 127.0.0.1, add them, or set security.trusted_network if only trusted hosts can reach it"
        )


def bind_socket(host: str, port: int, *, setting: str) -> socket.socket:
    """Return a socket that holds a TCP port and does not listen yet. Raises ConfigError for an unavailable port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Declared as TCP, because otherwise asyncio does not disable Nagle's algorithm for accepted connections.
        holder = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise cannot_listen(host, port, error, setting=setting) from error
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise cannot_listen(host, port, error, setting=setting) from error
    return holder


def cannot_listen(host: str, port: int, error: OSError, *, setting: str) -> ConfigError:
    """Return the error for a port that is not available, with advice. ``setting`` names the port."""
    match error.errno:
        case errno.EADDRINUSE:
            advice = f"another process uses it; stop that (`pdmesh down` if it is a mesh), or set {setting} to another"
        case errno.EACCES:
            advice = f"ports below 1024 need root on most machines; set {setting} to a higher one"
        case errno.EADDRNOTAVAIL:
            advice = f"no network interface of this machine has that address; set the host beside {setting}"
        case errno.EAFNOSUPPORT:
            advice = f"this system has no IPv{6 if ':' in host else 4}; set the host beside {setting}"
        case _:
            advice = setting
    return ConfigError(f"cannot listen on {_address(host, port)}: {error.strerror}; {advice}")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: The metadata of every call between our services that carries the mesh token.
TOKEN_METADATA = "pdmesh-token"

#: The metadata of an operator's calls that carries the operators' token.
OPERATOR_METADATA = "pdmesh-operator-token"


#: Interval in which a channel that waits for its peer looks for new certificates, which the peer may require.
LOOK_S = 2.0


class MeshChannel:
    """A channel to a service of the mesh. Its calls carry the mesh token."""

    def __init__(self, address: str, security: SecurityConfig, tokens: Mapping[str, str]) -> None:
        """Open a channel, with TLS if and only if it is configured. Raise ConfigError for an unreadable certificate."""
        self._address = address
        self._server_name = security.tls_server_name
        self._files = None if security.tls_cert is None else CertificateFiles(security)
        self._channel = self._open()
        # gRPC requires ASCII text, and hexadecimal digits fit any token.
        self._metadata = tuple((name, token.encode().hex()) for name, token in tokens.items() if token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def channel_ready(self) -> None:
        """Wait until the channel is connected, however long that takes.

        If the certificate, key or authority has changed, open a new channel first. No call may be under way.
        """
        while True:
            await self._renew()
            with anyio.move_on_after(None if self._files is None else LOOK_S):
                await self._channel.channel_ready()
                return

    async def _renew(self) -> None:
        if self._files is not None and self._files.renewed() is not None:
            before, self._channel = self._channel, self._open()
            await before.close()

    def _open(self) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(self._address, options=GRPC_OPTIONS)
        named = () if self._server_name is None else (("grpc.ssl_target_name_override", self._server_name),)
        credentials = channel_credentials(self._files.current)
        return grpc.aio.secure_channel(self._address, credentials, options=(*GRPC_OPTIONS, *named))

    async def connect(self) -> bool:
        """Try to connect, as `channel_ready` does. Return False as soon as the attempt has failed."""
        await self._renew()
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                return False
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)
        return True

    def stream_stream(self, method: str) -> Callable[..., Any]:
        multi: Any = self._channel.stream_stream(method)
        return functools.partial(multi, metadata=self._metadata)

    def unary_unary(self, method: str) -> Callable[..., Any]:
        multi: Any = self._channel.unary_unary(method)
        return functools.partial(multi, metadata=self._metadata)


def refusal(code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that ends a call of any kind before a message is read."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(code, message)

    return grpc.stream_stream_rpc_method_handler(refuse)


#: Returns whether a call of this method, with this metadata, is accepted without the mesh token.
Admits = Callable[[str, Mapping[str, str]], bool]


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Checks the token in a call's metadata, in constant time. No message of a refused call is read."""

    def __init__(self, security: SecurityConfig, admits: Admits, rejected_peers: RejectedPeers) -> None:
        self._token = security.mesh_token.encode().hex()
        self._admits = admits
        self._strangers = rejected_peers
        self._refusal = refusal(
            grpc.StatusCode.UNAUTHENTICATED,
            "wrong mesh token: set the same security.mesh_token on every service",
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = metadata_of(handler_call_details)
        handler: grpc.RpcMethodHandler[Any, Any] | None = self._refusal
        if is_ours(metadata, self._token) or self._admits(handler_call_details.method, metadata):
            handler = await continuation(handler_call_details)
        else:
            self._strangers.refuse(RejectedPeerKind.TOKEN)
        return handler and _noting(handler, self._strangers)


def _noting(handler: Any, rejected_peers: RejectedPeers) -> grpc.RpcMethodHandler[Any, Any]:
    """Return ``handler`` so that each call first notes its peer by `RejectedPeers.called`.

    ``handler`` must take and answer streams, or take and answer single messages.
    """
    behaviour = handler.stream_stream or handler.unary_unary

    async def handle(request: Any, context: Any) -> Any:
        rejected_peers.called(context.peer())
        return await behaviour(request, context)

    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(handle)
    return grpc.unary_unary_rpc_method_handler(handle)


def is_ours(metadata: Mapping[str, str], token_hex: str) -> bool:
    """Whether a call's metadata has the mesh token, given in hexadecimal digits. Compares in constant time."""
    return hmac.compare_digest(metadata.get(TOKEN_METADATA, "").encode(), token_hex.encode())


def metadata_of(details: grpc.HandlerCallDetails) -> dict[str, str]:
    """Return a call's metadata without its binary entries."""
    metadata: Any = details.invocation_metadata or ()
    return {key: value for key, value in metadata if isinstance(value, str)}


def check_kv_devices(devices: str, config: TransferConfig, security: SecurityConfig) -> None:
    """Raise ConfigError if KV would be sent over an untrusted network, because UCX has neither TLS nor keys.

    Raises it too if KV shall be encrypted and there is no mesh token.
    """
    if config.encrypt and not security.mesh_token:
        raise ConfigError("transfer.encrypt makes its keys of security.mesh_token: set that on every service")
    beyond = [device for device in devices.split(",") if device.strip() not in {"", "lo"}]
    if beyond and not config.trusted_network:
        raise ConfigError(
            f"KV would be sent over {', '.join(beyond)}, and UCX accepts data from any sender there, with or without "
            "TLS (transfer.encrypt hides KV, but does not keep a stranger's bytes from ending an instance): leave "
            "transfer.ucx_net_devices (UCX_NET_DEVICES) unset to keep KV inside this host, or set "
            "transfer.trusted_network if only hosts of the mesh can reach it (security.trusted_network says nothing "
            "of it)"
        )


@asynccontextmanager
async def serving(
    service: str,
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]],
    *,
    host: str,
    port: int,
    security: SecurityConfig,
    setting: str = "its port",
    grace_s: float | None = None,
    admits: Admits = lambda _method, _metadata: False,
    rejected_peers: RejectedPeers | None = None,
) -> AsyncGenerator[int]:
    """Serve generic ``methods`` of ``service`` within the block, and yield the port.

    Raise ConfigError if the port is taken or open to any peer.

    ``setting`` names the port in the error if it is not available. A call without the mesh token is accepted only if
    ``admits`` returns True. ``rejected_peers`` counts refused peers. When the block is left, new calls are refused and
    running ones are cancelled, after ``grace_s`` if given.
    """
    check_bind(host, security, what=service, has_key=bool(security.mesh_token))
    rejected_peers = rejected_peers or RejectedPeers()
    server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[_Doorkeeper(security, admits, rejected_peers)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    bound_port = bind(server, host, port, security, setting=setting, on_handshake=rejected_peers.connected)
    await server.start()
    try:
        yield bound_port
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(grace_s)


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    security: SecurityConfig,
    *,
    setting: str,
    on_handshake: Callable[[], None] = lambda: None,
) -> int:
    """Add a port, with TLS if configured, and return its number.

    Raises ConfigError if the port is not available, with ``setting`` as its name, or if a certificate cannot be read.
    ``on_handshake`` is called, on a thread of gRPC's, when a peer begins to connect with TLS.
    """
    address = _address(host, port)
    try:
        if security.tls_cert is not None and security.tls_key is not None:
            return server.add_secure_port(address, server_credentials(CertificateFiles(security), on_handshake))
        return server.add_insecure_port(address)
    except RuntimeError as error:
        bind_socket(host, port, setting=setting).close()
        raise ConfigError(f"cannot listen on {address}: {error} ({setting})") from error


def open_channel(address: str, security: SecurityConfig) -> MeshChannel:
    """Open a channel to a service of the mesh, with TLS if and only if it is configured."""
    return MeshChannel(address, security, {TOKEN_METADATA: security.mesh_token})


def open_operator_channel(address: str, security: SecurityConfig) -> MeshChannel:
    """Open a channel for an operator: as `open_channel`, but calls also carry the operator's token."""
    tokens = {TOKEN_METADATA: security.mesh_token, OPERATOR_METADATA: security.operator_token}
    return MeshChannel(address, security, tokens)
