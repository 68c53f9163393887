"""A mesh on five hosts: a leading scheduler and its standby, etcd with TLS, an instance of each kind, and a gateway."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pdmesh.cli.processes import ending_with_us
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.host_load import LIMIT_S, log_of
from pdmesh_testing.hosts import SCHEDULER_PORT, Hosts, running_hosts, until
from pdmesh_testing.standby import etcd_command, etcd_data_folder

#: a, b: a scheduler each; c: a prefill and a decode instance; d: gateway, and the clients; e: etcd.
HOSTS = ("a", "b", "c", "d", "e")
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380

#: What a scheduler says of its own part: the last of these holds.
LEADS, FOLLOWS, HAS_LED = '"leading"', '"standing by"', "lease lost; this scheduler stops"


@contextmanager
def running_two_schedulers(folder: Path, more: Mapping[str, str]) -> Generator[Hosts]:
    """Yield the hosts, on which the scheduler of ``a`` leads."""
    settings = {
        "MODEL": str(write_checkpoint(folder / "model", seed=3)),
        "SCHEDULER_ADDRESS": f"10.77.0.1:{SCHEDULER_PORT},10.77.0.2:{SCHEDULER_PORT}",
        "STANDBY_STORE": "etcd",
        "STANDBY_ETCD_ENDPOINTS": f"https://10.77.0.5:{ETCD_PORT}",
        **more,
    }
    with running_hosts(folder / "hosts", HOSTS, settings) as hosts:
        for name in HOSTS:
            own = hosts[name].folder
            shown = {"CA": own / "ca.pem", "CERT": own / "mesh.pem", "KEY": own / "mesh.key"}
            hosts[name].settings = {
                **hosts[name].settings,
                **{f"STANDBY_ETCD_{what}": str(file) for what, file in shown.items()},
            }
        data = etcd_data_folder(folder)
        etcd = hosts["e"].command(etcd_command(hosts["e"].address, ETCD_PORT, ETCD_PEER_PORT, data, hosts["e"].folder))
        with (
            (folder / "etcd.log").open("wb") as log,
            subprocess.Popen(ending_with_us(etcd), stdout=log, stderr=log) as process,
        ):
            try:
                with log_of(hosts, "a", "scheduler") as said:
                    hosts["a"].start("scheduler", "scheduler")
                    until(lambda: LEADS in said(), LIMIT_S)
                hosts["b"].start("scheduler", "scheduler")
                for kind in ("prefill", "decode"):
                    hosts["c"].start(kind, kind)
                hosts["d"].start("gateway", "gateway")
                yield hosts
            finally:
                process.kill()
        shutil.rmtree(data)
