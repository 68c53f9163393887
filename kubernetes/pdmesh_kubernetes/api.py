"""Client of the API server of Kubernetes, with the token and the authority of a pod's service account."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec

from pdmesh.errors import ConfigError, PdmeshError

#: Largest answer that is read. The pods of one mesh take a few kilobytes each.
MAX_ANSWER_BYTES = 16 << 20

MERGE_PATCH = "application/merge-patch+json"


class KubernetesError(PdmeshError):
    """The API server cannot be reached, or refuses. The message names the request."""


class Conflict(KubernetesError):
    """Another client has changed or made the object since it was read."""


class Missing(KubernetesError):
    """No object has that name."""


class Forbidden(KubernetesError):
    """The service account has no permission for the request."""


class KubernetesApi:
    """Client of the API server. Made by `open_kubernetes`."""

    def __init__(self, client: httpx.AsyncClient, token_file: Path, namespace: str) -> None:
        self._client = client
        self._token_file = token_file
        self.namespace = namespace

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """Return an object, or a list of objects; None if there is none of that name. Raises KubernetesError."""
        try:
            return await self._call("GET", path, params=params)
        except Missing:
            return None

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object. Raises Conflict or KubernetesError."""
        return await self._call("POST", path, body=body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge ``body`` into an object. If ``body`` has a ``resourceVersion``, the object must have the same.

        Raises Conflict, Missing or KubernetesError.
        """
        return await self._call("PATCH", path, body=body)

    async def delete(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Delete an object; a missing one counts as deleted. Raises Conflict or KubernetesError."""
        with suppress(Missing):
            await self._call("DELETE", path, body=body)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        try:
            token = (await anyio.Path(self._token_file).read_text()).strip()  # replaced every hour
            headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
            if body is not None:
                headers["content-type"] = MERGE_PATCH if method == "PATCH" else "application/json"
            content = None if body is None else msgspec.json.encode(body)
            async with self._client.stream(method, path, params=params, content=content, headers=headers) as response:
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise KubernetesError(f"{method} {path}: the API server's answer is too long")
        except (httpx.HTTPError, OSError) as error:
            raise KubernetesError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if response.status_code >= 400:
            kind = {403: Forbidden, 404: Missing, 409: Conflict}.get(response.status_code, KubernetesError)
            raise kind(f"{method} {path}: {response.status_code} {_message(bytes(answer))}")
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError) as error:
            raise KubernetesError(f"{method} {path}: the API server's answer is not a JSON object: {error}") from error


def _message(answer: bytes) -> str:
    """Return the error message of the API server, from a Status if the answer is one."""
    try:
        return str(msgspec.json.decode(answer, type=dict[str, Any])["message"])[:500]
    except (msgspec.MsgspecError, ValueError, KeyError):
        return answer[:200].decode(errors="replace")


@asynccontextmanager
async def open_kubernetes(api: str, account: Path, *, limit_s: float) -> AsyncGenerator[KubernetesApi]:
    """Yield a client for the URL ``api``, with the service account whose files are in a folder. Raises ConfigError."""
    ca, token = account / "ca.crt", account / "token"
    try:
        namespace = (await anyio.Path(account / "namespace").read_text()).strip()
        await anyio.Path(token).read_text()
        trusts = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(
            f"kubernetes.account: {account} lacks a file of a service account (token, ca.crt, namespace): {error}; "
            "outside a cluster choose another standby.store"
        ) from error
    async with httpx.AsyncClient(base_url=api, verify=trusts, trust_env=False, timeout=limit_s) as client:
        yield KubernetesApi(client, token, namespace)
