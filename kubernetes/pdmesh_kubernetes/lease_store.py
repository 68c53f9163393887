"""A lease record in a Lease of Kubernetes (``coordination.k8s.io/v1``), compared by its resource version."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from pdmesh.config import MeshConfig
from pdmesh_kubernetes.api import Conflict, KubernetesApi, KubernetesError, Missing, open_kubernetes
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import StoredRecord, StoreUnavailable, decode_record, encode_record

#: Annotation with the record. The Lease's own fields show the same to people.
RECORD = "pdmesh/record"


def _now() -> datetime:
    return datetime.now(UTC)


class KubernetesStore:
    """Lease store in a Lease's annotation; implements `LeaseStore`."""

    def __init__(self, api: KubernetesApi, name: str, lease_s: float, now: Callable[[], datetime] = _now) -> None:
        self._api = api
        self._name = name
        self._lease_s = lease_s
        self._now = now
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"

    async def read(self) -> StoredRecord:
        """Return the record and its version. Raises StoreUnavailable."""
        try:
            lease = await self._api.get(f"{self._leases}/{self._name}")
        except KubernetesError as error:
            raise StoreUnavailable(str(error)) from error
        if lease is None:
            return StoredRecord(None, None)
        record = (lease["metadata"].get("annotations") or {}).get(RECORD)
        return StoredRecord(
            None if record is None else decode_record(record), str(lease["metadata"]["resourceVersion"])
        )

    async def swap(self, record: LeaseRecord, version: str | None) -> str | None:
        """Write a record if the Lease has that resource version, or does not exist if that is None.

        Return the new version; None if nothing was written. Raises StoreUnavailable.
        """
        lease = self._lease(record, version)
        try:
            if version is None:
                written = await self._api.post(self._leases, lease)
            else:
                written = await self._api.patch(f"{self._leases}/{self._name}", lease)
        except (Conflict, Missing):
            return None
        except KubernetesError as error:
            raise StoreUnavailable(str(error)) from error
        return str(written["metadata"]["resourceVersion"])

    def _lease(self, record: LeaseRecord, version: str | None) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._name,
            "namespace": self._api.namespace,
            "annotations": {RECORD: encode_record(record).decode()},
        }
        if version is not None:
            metadata["resourceVersion"] = version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": record.address or None,
                "leaseDurationSeconds": math.ceil(self._lease_s),
                "renewTime": self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }


@asynccontextmanager
async def open_store(config: MeshConfig) -> AsyncGenerator[KubernetesStore]:
    """Yield the store on the API server that the settings name. Raises ConfigError."""
    kubernetes, standby = config.kubernetes, config.standby
    async with open_kubernetes(kubernetes.api, kubernetes.account, limit_s=standby.lease_s) as api:
        yield KubernetesStore(api, standby.name, standby.lease_s)
