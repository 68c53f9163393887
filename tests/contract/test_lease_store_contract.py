"""What every store of the leading scheduler's lease does: a file, etcd, a Lease of Kubernetes, and the fake."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest

from pdmesh import watched_file
from pdmesh.cli.tls import LOCAL_HOSTS, make_certificates
from pdmesh.cluster_config import StandbyConfig
from pdmesh_kubernetes.lease_store import RECORD, KubernetesStore
from pdmesh_scheduler.standby.etcd_store import open_etcd
from pdmesh_scheduler.standby.file_store import FileStore
from pdmesh_scheduler.standby.leadership import LeaseRecord
from pdmesh_scheduler.standby.lease_store import LeaseStore, StoredRecord, StoreUnavailable
from pdmesh_testing.certificates import make_expired
from pdmesh_testing.kubernetes import NAMESPACE, FakeApiServer, Rule, asking
from pdmesh_testing.running_scheduler import MemoryStore
from pdmesh_testing.standby import running_etcd, why_no_etcd

pytestmark = pytest.mark.anyio

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/pdmesh"

RECORDS = [
    LeaseRecord(holder_id=f"id-{beat}", address="10.0.0.1:7000", term=beat, beat=beat, state='{"é": "\\n"}')
    for beat in range(12)
]


@dataclass
class Kept:
    """A store that nothing was written to, and what can be done to it."""

    store: LeaseStore
    break_it: Callable[[], object]
    damage: Callable[[], object] | None = None


@asynccontextmanager
async def in_memory(_folder: Path) -> AsyncGenerator[Kept]:
    store = MemoryStore()
    yield Kept(store, lambda: setattr(store, "is_away", True))


@asynccontextmanager
async def in_a_file(folder: Path) -> AsyncGenerator[Kept]:
    path = folder / "state/lease.json"

    def break_it() -> None:
        path.unlink(missing_ok=True)
        path.mkdir()

    yield Kept(FileStore(path), break_it, lambda: path.write_bytes(b"{"))


@asynccontextmanager
async def in_etcd(folder: Path) -> AsyncGenerator[Kept]:
    if (why_not := why_no_etcd()) is not None:
        pytest.skip(why_not)
    async with running_etcd(folder) as port:
        away = "http://127.0.0.1:9"
        endpoints = f"{away},http://127.0.0.1:{port}"  # the first member is down
        async with open_etcd(StandbyConfig(etcd_endpoints=endpoints)) as store:
            yield Kept(store, lambda: store._endpoints.__setitem__(slice(None), [away]))


@asynccontextmanager
async def in_etcd_with_tls(folder: Path) -> AsyncGenerator[Kept]:
    tls = folder / "right"
    skip_without_tls()
    make_certificates(tls, hosts=LOCAL_HOSTS, days=2)
    async with running_etcd(folder, tls) as port, open_etcd(with_tls(port, tls)) as store:
        yield Kept(store, lambda: store._endpoints.__setitem__(slice(None), ["https://127.0.0.1:9"]))


def skip_without_tls() -> None:
    if (why_not := why_no_etcd()) is not None:
        pytest.skip(why_not)
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")


def with_tls(port: int, folder: Path, name: str = "mesh") -> StandbyConfig:
    return StandbyConfig(
        etcd_endpoints=f"https://127.0.0.1:{port}",
        etcd_ca=folder / "ca.pem",
        etcd_cert=folder / f"{name}.pem",
        etcd_key=folder / f"{name}.key",
    )


@asynccontextmanager
async def in_kubernetes(folder: Path) -> AsyncGenerator[Kept]:
    server = FakeApiServer()
    async with asking(server, folder) as api:

        def damage() -> None:
            server.put(LEASE, {"metadata": {"annotations": {RECORD: "{"}}})

        yield Kept(KubernetesStore(api, "pdmesh", 3.0), lambda: setattr(server, "is_away", True), damage)


@pytest.fixture(params=[in_memory, in_a_file, in_etcd, in_etcd_with_tls, in_kubernetes], ids=lambda made: made.__name__)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Kept]:
    made: Callable[[Path], AbstractAsyncContextManager[Kept]] = request.param
    async with made(tmp_path) as kept:
        yield kept


async def test_what_was_written_is_read(kept: Kept) -> None:
    assert await kept.store.read() == StoredRecord(None, None)
    version = None
    for record in RECORDS[:3]:
        version = await kept.store.swap(record, version)
        assert version is not None
        assert await kept.store.read() == StoredRecord(record, version)


async def test_nobody_writes_over_what_it_has_not_read(kept: Kept) -> None:
    assert await kept.store.swap(RECORDS[0], "7") is None
    first = await kept.store.swap(RECORDS[0], None)
    assert first is not None
    assert await kept.store.swap(RECORDS[1], None) is None
    second = await kept.store.swap(RECORDS[1], first)
    assert second not in (None, first)
    assert await kept.store.swap(RECORDS[2], first) is None
    assert await kept.store.read() == StoredRecord(RECORDS[1], second)


@pytest.mark.parametrize("is_first", [True, False])
async def test_of_many_who_write_at_once_one_does(kept: Kept, is_first: bool) -> None:
    version = None if is_first else await kept.store.swap(LeaseRecord(), None)
    won: list[LeaseRecord] = []

    async def write(record: LeaseRecord) -> None:
        # A file that another one has locked for a moment is one that cannot be asked now.
        try:
            if await kept.store.swap(record, version) is not None:
                won.append(record)
        except StoreUnavailable:
            assert isinstance(kept.store, FileStore)

    async with anyio.create_task_group() as tasks:
        for record in RECORDS:
            tasks.start_soon(write, record)
    assert [(await kept.store.read()).record] == won


async def test_it_keeps_what_operators_of_a_large_mesh_ask_for(kept: Kept) -> None:
    record = replace(RECORDS[0], state="x" * 100_000)
    version = await kept.store.swap(record, None)
    assert await kept.store.read() == StoredRecord(record, version)


async def test_one_that_is_away_says_so(kept: Kept) -> None:
    await kept.store.swap(RECORDS[0], None)
    kept.break_it()
    with pytest.raises(StoreUnavailable):
        await kept.store.read()
    with pytest.raises(StoreUnavailable):
        await kept.store.swap(RECORDS[1], "1")


async def test_a_damaged_record_is_no_record(kept: Kept) -> None:
    """Nobody leads by it, or writes over it, until somebody has looked."""
    if kept.damage is None:
        pytest.skip("it cannot be damaged")
    await kept.store.swap(RECORDS[0], None)
    kept.damage()
    with pytest.raises(StoreUnavailable, match="not a lease of pdmesh"):
        await kept.store.read()


async def test_etcd_and_a_scheduler_that_do_not_trust_each_other_say_so_in_a_sentence(tmp_path: Path) -> None:
    """A certificate that etcd did not accept ended the scheduler with a traceback."""
    skip_without_tls()
    right, other = tmp_path / "right", tmp_path / "other"
    for folder in (right, other):
        make_certificates(folder, hosts=LOCAL_HOSTS, days=2)
    make_expired(right)
    async with running_etcd(tmp_path, right) as port:
        ours = with_tls(port, right)
        not_accepted = "its certificate is not accepted .*: standby.etcd_ca must hold the authority"
        broken_off = "it closed the connection: .* a standby.etcd_cert of the authority that it trusts"
        for config, message in (
            (replace(ours, etcd_ca=other / "ca.pem"), not_accepted),
            (replace(ours, etcd_ca=None), not_accepted),
            (replace(with_tls(port, other), etcd_ca=ours.etcd_ca), broken_off),
            (with_tls(port, right, "expired"), broken_off),
            (replace(ours, etcd_cert=None, etcd_key=None), broken_off),
            (replace(ours, etcd_endpoints=f"http://127.0.0.1:{port}"), broken_off),
        ):
            async with open_etcd(config) as store:
                for act in (store.read(), store.swap(RECORDS[0], None)):
                    with pytest.raises(StoreUnavailable, match=message):
                        await act
        async with open_etcd(ours) as store:
            assert await store.read() == StoredRecord(None, None)
    async with running_etcd(tmp_path) as port, open_etcd(with_tls(port, right)) as store:
        # It may hang up before it is heard.
        with pytest.raises(StoreUnavailable, match=r"TLS failed|does not answer"):
            await store.read()


async def test_etcd_is_shown_the_certificate_that_is_there_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_tls()
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    tls = tmp_path / "right"
    make_certificates(tls, hosts=LOCAL_HOSTS, days=2)
    make_expired(tls)
    for suffix in ("pem", "key"):
        shutil.copy(tls / f"expired.{suffix}", tls / f"shown.{suffix}")
    async with running_etcd(tmp_path, tls) as port, open_etcd(with_tls(port, tls, "shown")) as store:
        with pytest.raises(StoreUnavailable):
            await store.read()
        shutil.copy(tls / "mesh.pem", tls / "shown.pem")
        with pytest.raises(StoreUnavailable):
            await store.read()  # half of a pair: what was there before stays
        shutil.copy(tls / "mesh.key", tls / "shown.key")
        assert await store.read() == StoredRecord(None, None)


async def test_kubernetes_keeps_what_others_wrote_on_the_lease_and_tells_people(tmp_path: Path) -> None:
    server = FakeApiServer()
    server.put(LEASE, {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}, "spec": {}})
    async with asking(server, tmp_path) as api:
        store = KubernetesStore(api, "pdmesh", 3.0)
        empty = await store.read()
        assert empty.record is None
        version = await store.swap(RECORDS[1], empty.version)
        assert await store.read() == StoredRecord(RECORDS[1], version)
    lease = server.objects[LEASE]
    assert lease["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "Helm"}
    assert lease["spec"]["holderIdentity"] == RECORDS[1].address


async def test_kubernetes_says_what_a_role_lacks(tmp_path: Path) -> None:
    server = FakeApiServer(rules=[Rule(("coordination.k8s.io",), ("leases",), ("get",))])
    async with asking(server, tmp_path) as api:
        with pytest.raises(StoreUnavailable, match="may not create leases"):
            await KubernetesStore(api, "pdmesh", 3.0).swap(RECORDS[0], None)
