"""A lease record under a key of etcd, through the JSON gateway of etcd's API v3."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from pdmesh.cluster_config import StandbyConfig
from pdmesh.errors import ConfigError
from pdmesh_scheduler.standby.etcd_client import EtcdClient, refusal_of
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import StoredRecord, StoreUnavailable, decode_record, encode_record


class EtcdStore:
    """Lease store that compares a key's revision; implements `LeaseStore`. Made by `open_etcd`."""

    def __init__(self, client: EtcdClient, endpoints: Sequence[str], key: str) -> None:
        self._client = client
        self._endpoints = list(endpoints)  # the last one to answer is the first
        self._key = b64encode(key.encode()).decode()

    async def read(self) -> StoredRecord:
        """Return the record and its revision; two Nones if the key does not exist.

        Raise StoreUnavailable if etcd does not answer, or if the key has no valid record.
        """
        answer = await self._call("range", {"key": self._key})
        match answer:
            case {"kvs": [{"value": str(value), "mod_revision": str(revision)}]}:
                return StoredRecord(decode_record(b64decode(value)), revision)
            case {"kvs": _}:
                raise StoreUnavailable("etcd sent an unexpected answer")
            case _:
                return StoredRecord(None, None)

    async def swap(self, record: LeaseRecord, version: str | None) -> str | None:
        """Write a record if the key still has the revision ``version``, or does not exist if that is None.

        Return the new revision; None if nothing was written. Raise StoreUnavailable if etcd does not answer.
        """
        same = {"target": "MOD", "mod_revision": version} if version else {"target": "VERSION", "version": "0"}
        put = {"key": self._key, "value": b64encode(encode_record(record)).decode()}
        transaction = {
            "compare": [{"key": self._key, "result": "EQUAL", **same}],
            "success": [{"request_put": put}],
        }
        match await self._call("txn", transaction):
            case {"succeeded": True, "header": {"revision": str(revision)}}:
                return revision
            case _:
                return None

    async def _call(self, method: str, body: dict[str, Any]) -> Any:
        """Ask the members in turn until one answers. Raises StoreUnavailable if none does.

        A write that is sent twice because its answer was lost takes effect at most once.
        """
        problems: list[str] = []
        for endpoint in tuple(self._endpoints):
            answered = False
            try:
                response = await self._client.post(f"{endpoint}/v3/kv/{method}", json=body)
                if response.status_code == 200:
                    answered = True
                    return msgspec.json.decode(response.content)
                problems.append(f"{endpoint}: {response.status_code} {response.text[:200]}")
            except (httpx.HTTPError, OSError, msgspec.DecodeError) as error:  # some TLS errors are not wrapped
                problems.append(f"{endpoint}: {refusal_of(error)}")
            finally:
                if not answered and self._endpoints[0] == endpoint:  # also after a cancelled wait
                    self._endpoints.append(self._endpoints.pop(0))
        raise StoreUnavailable(f"etcd does not answer: {'; '.join(problems)}")


@asynccontextmanager
async def open_etcd(config: StandbyConfig) -> AsyncGenerator[EtcdStore]:
    """Yield a store on the cluster that the settings name. Raise ConfigError for invalid addresses."""
    endpoints = [each.strip().rstrip("/") for each in config.etcd_endpoints.split(",") if each.strip()]
    if not endpoints or not all(each.startswith(("http://", "https://")) for each in endpoints):
        raise ConfigError(
            "standby.etcd_endpoints is not set: name etcd's addresses, such as https://10.0.0.1:2379,https://10.0.0.2:2379"
        )
    async with EtcdClient(config) as client:
        yield EtcdStore(client, endpoints, config.name)
