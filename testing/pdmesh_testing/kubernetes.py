"""A stand-in for the API server of Kubernetes: objects with resource versions, and the rules of a Role."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh_kubernetes.api import KubernetesApi

NAMESPACE = "models"
STATEFUL_SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
TOKEN = "token-of-the-service-account"


class ApiTarget(NamedTuple):
    """Target of an API path."""

    group: str
    #: Resource, with a subresource as rules name it: "statefulsets/scale".
    resource: str
    #: Path of the collection.
    collection: str
    #: Empty for all objects.
    name: str


class Rule(NamedTuple):
    """A rule of a Role."""

    groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    #: Empty for all objects.
    names: tuple[str, ...] = ()

    def allows(self, target: ApiTarget, verb: str) -> bool:
        return (
            target.group in self.groups
            and target.resource in self.resources
            and verb in self.verbs
            and (not self.names or target.name in self.names)
        )


def rules_of(role: dict[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of a Role's manifest."""
    return tuple(
        Rule(
            tuple(rule["apiGroups"]),
            tuple(rule["resources"]),
            tuple(rule["verbs"]),
            tuple(rule.get("resourceNames", ())),
        )
        for rule in role["rules"]
    )


@dataclass
class FakeApiServer:
    """API server that stores objects by path. ``changed`` is called after each change, in place of a watch."""

    #: Rules of the only caller; None allows everything.
    rules: Iterable[Rule] | None = None
    #: Every answer is 503.
    is_away: bool = False
    objects: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    asked: list[str] = field(default_factory=list[str])
    changed: Callable[[], None] = lambda: None
    _revision: int = 100

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make or replace an object, as another client does."""
        self._revision += 1
        made = deepcopy(body)
        made.setdefault("metadata", {}).update(
            name=path.rpartition("/")[2], namespace=NAMESPACE, resourceVersion=str(self._revision)
        )
        self.objects[path] = made
        return made

    def all(self, collection: str) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        return [each for path, each in sorted(self.objects.items()) if path.rpartition("/")[0] == collection]

    def app(self) -> Starlette:
        """Return it as an application."""
        return Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
        )

    async def _answer(self, request: Request) -> Response:
        target = _target(request.url.path)
        verb = {"GET": "get" if target.name else "list", "POST": "create", "PUT": "update"}.get(
            request.method, request.method.lower()
        )
        self.asked.append(f"{verb} {target.resource} {target.name}".strip())
        if self.is_away:
            return _failure(503, "the API server is away")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _failure(401, "Unauthorized")
        if self.rules is not None and not any(rule.allows(target, verb) for rule in self.rules):
            return _failure(403, f"the service account may not {verb} {target.resource} {target.name}")
        content = await request.body()
        body = json.loads(content) if content else {}
        match verb:
            case "list":
                labels = [each.split("=") for each in request.query_params.get("labelSelector", "").split(",") if each]
                items = [
                    each
                    for each in self.all(target.collection)
                    if all(each["metadata"].get("labels", {}).get(name) == value for name, value in labels)
                ]
                return JSONResponse({"kind": "List", "items": items})
            case "create":
                return self._create(target, body)
            case _:
                return self._one(verb, target, body)

    def _create(self, target: ApiTarget, body: dict[str, Any]) -> Response:
        path = f"{target.collection}/{body['metadata']['name']}"
        if path in self.objects:
            return _failure(409, f"{path} already exists")
        made = self.put(path, body)
        self.changed()
        return JSONResponse(made, 201)

    def _one(self, verb: str, target: ApiTarget, body: dict[str, Any]) -> Response:
        path = f"{target.collection}/{target.name}"
        there = self.objects.get(path)
        if there is None:
            return _failure(404, f"{path} not found")
        wanted = body.get("metadata", {}).get("resourceVersion")
        wanted = wanted or body.get("preconditions", {}).get("resourceVersion")
        uid = body.get("preconditions", {}).get("uid")
        if wanted not in (None, there["metadata"]["resourceVersion"]) or uid not in (
            None,
            there["metadata"].get("uid"),
        ):
            return _failure(409, f"{path} has been modified")
        match verb:
            case "get":
                return JSONResponse(there)
            case "delete":
                self._delete(path, there)
                self.changed()
                return JSONResponse({"kind": "Status", "status": "Success"})
            case _:
                made = self.put(path, _merged(there, body))
                self.changed()
                return JSONResponse(made)

    def _delete(self, path: str, there: dict[str, Any]) -> None:
        del self.objects[path]


class FakeCluster(FakeApiServer):
    """A stand-in whose StatefulSets have pods: made with the lowest number that is free, and the last ones deleted."""

    def __init__(self, rules: Iterable[Rule] | None = None) -> None:
        super().__init__(rules)
        self.changed = self.reconcile
        self._uids = count()

    def add_set(self, name: str, num_pods: int, labels: dict[str, str]) -> None:
        """Add a StatefulSet, with its pods."""
        body = {"spec": {"replicas": num_pods, "template": {"metadata": {"labels": labels}}}}
        metadata = {"uid": f"uid-{next(self._uids)}"}
        self.put(f"{STATEFUL_SETS}/{name}", {"metadata": metadata, **body, "status": {"updateRevision": "one"}})
        self.reconcile()

    def pod(self, name: str) -> dict[str, Any]:
        """Return a pod."""
        return self.objects[f"{PODS}/{name}"]

    @property
    def pod_names(self) -> list[str]:
        """The names of all pods."""
        return [each["metadata"]["name"] for each in self.all(PODS)]

    def reconcile(self) -> None:
        """Do what the controller of StatefulSets does."""
        for each in self.all(STATEFUL_SETS):
            name, spec = each["metadata"]["name"], each["spec"]
            wanted = {f"{PODS}/{name}-{number}" for number in range(spec["replicas"])}
            there = {path for path in self.objects if path.startswith(f"{PODS}/{name}-")}
            for path in there - wanted:
                del self.objects[path]
            for path in wanted - there:
                labels = {
                    **spec["template"]["metadata"]["labels"],
                    "controller-revision-hash": each["status"]["updateRevision"],
                }
                status = {
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"restartCount": 0}],
                }
                metadata = {
                    "labels": labels,
                    "uid": f"uid-{next(self._uids)}",
                    "ownerReferences": [{"kind": "StatefulSet", "uid": each["metadata"]["uid"], "controller": True}],
                }
                self.put(path, {"metadata": metadata, "status": status})


def _target(path: str) -> ApiTarget:
    parts = path.strip("/").split("/")
    at = parts.index("namespaces")
    group = parts[1] if parts[0] == "apis" else ""
    kind, *rest = parts[at + 2 :]
    resource = f"{kind}/{rest[1]}" if len(rest) > 1 else kind
    return ApiTarget(group, resource, "/" + "/".join(parts[: at + 3]), rest[0] if rest else "")


def _merged(there: Any, patch: Any) -> Any:
    """Return an object after a JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(there) if isinstance(there, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _failure(status: int, message: str) -> Response:
    return JSONResponse({"kind": "Status", "status": "Failure", "message": message}, status)


def write_account(folder: Path) -> Path:
    """Write the files of a service account but for its authority, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "namespace").write_text(NAMESPACE)
    return folder


@asynccontextmanager
async def asking(server: FakeApiServer, folder: Path) -> AsyncGenerator[KubernetesApi]:
    """Yield a client of a stand-in, without a socket between them."""
    transport = httpx.ASGITransport(app=server.app())
    async with httpx.AsyncClient(transport=transport, base_url="https://kubernetes") as client:
        yield KubernetesApi(client, write_account(folder) / "token", NAMESPACE)
