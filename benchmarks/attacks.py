"""What one client's hostile requests cost the others: worst latency before and during each attack, refusals, memory.

    python benchmarks/attacks.py [--seconds 6] [--keys] [--only NAME]

A 1P+1D mesh of stand-in engines. A client sends a short request every 50 ms, by a connection of its own; the attacks
run beside it, bounded in number and bytes, each as often as it takes for that client to have 20 answers. Held: nobody
else is refused, their worst latency is at most twice that of before, or 1 s, and the gateway's memory stays within
512 MiB of what it was.

With ``--keys`` the two have keys of their own, and so fair shares of the mesh; without it nobody knows them apart.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx

from pdmesh.apikeys import ApiKey, entry_of, hash_key, new_key
from pdmesh_testing.mesh import RunningMesh, running_mesh

MAX_WORST_S = 1.0
MAX_GROWTH_MIB = 512

#: One that had fewer answers during an attack says little of it.
NUM_ASKED = 20

#: Then the attack is not repeated any more.
ATTACK_LIMIT_S = 60.0

Attack = Callable[[str, int], None]

#: Of the attacker and of the other client, where they have keys.
KEYS = {"attacker": new_key(), "bystander": new_key()}


def client_of(name: str, base_url: str) -> httpx.Client:
    """A client with the key of this name, which is asked for only with ``--keys``."""
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.Client(base_url=base_url, headers=headers, timeout=60, trust_env=False)


def post(path: str, body: bytes, num_times: int, num_threads: int = 4) -> Attack:
    """Send a body so many times."""

    def one(base_url: str) -> None:
        with client_of("attacker", base_url) as client:
            for _ in range(num_times):
                with suppress(httpx.HTTPError):
                    client.post(path, content=body)

    def attack(base_url: str, _port: int) -> None:
        threads = [threading.Thread(target=one, args=(base_url,)) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return attack


def raw(head: bytes, filler: bytes, num_fillers: int, num_connections: int, stay_s: float = 0.0) -> Attack:
    """Open connections, send, and stay."""

    def attack(_base_url: str, port: int) -> None:
        sockets: list[socket.socket] = []
        for _ in range(num_connections):
            with suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                sockets.append(connection)
                first, _, rest = head.partition(b"\r\n")
                authorization = f"authorization: Bearer {KEYS['attacker']}".encode()
                connection.sendall(b"\r\n".join((first, authorization, rest)))
                for _ in range(num_fillers):
                    connection.sendall(filler)
        time.sleep(stay_s)
        for connection in sockets:
            connection.close()

    return attack


UPLOAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 33000000\r\n\r\n"
ATTACKS: dict[str, Attack] = {
    "targets of 5e-324 ms": post("/v1/completions", b'{"prompt":"a","slo_ttft_ms":5e-324}', 50),
    "32 prompts of 8,000 ids, n=128": post(
        "/v1/completions", json.dumps({"prompt": [[5] * 8000] * 32, "n": 128, "max_tokens": 1}).encode(), 1, 1
    ),
    "8 prompts of 8,000 ids, n=128": post(
        "/v1/completions", json.dumps({"prompt": [[5] * 8000] * 8, "n": 128, "max_tokens": 1}).encode(), 1, 1
    ),
    "/tokenize of 8 MB": post("/tokenize", json.dumps({"prompt": "word " * 1_600_000}).encode(), 2),
    "8 million prompts": post("/v1/completions", b'{"prompt":[' + b'"",' * 8_000_000 + b'""]}', 1),
    "2.5 million messages": post("/v1/chat/completions", b'{"messages":[' + b'{"role":""},' * 2_500_000 + b"{}]}", 1),
    "16 million ids": post("/detokenize", b'{"tokens":[' + b"1," * 16_000_000 + b"1]}", 1),
    "NaN in 30 MB": post("/v1/completions", b'{"min_p":NaN,"prompt":[' + b"1," * 15_000_000 + b"1]}", 1),
    "16 idle uploads": raw(UPLOAD, b"", 0, 16, stay_s=5),
    "16 uploads of 31 MB, then idle": raw(UPLOAD, b" " * 1_000_000, 31, 16, stay_s=5),
    "a header of 100 MB": raw(b"GET /live HTTP/1.1\r\nx: ", b"y" * 1_000_000, 100, 2),
    "strangers' templates": post(
        "/v1/chat/completions",
        b'{"messages":[{"role":"user"}],"chat_template":"{% for a in range(9**9) %}{% endfor %}"}',
        25,
    ),
    "arguments nested 990 deep": post(
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","tool_calls":[{"function":{"arguments":%s}}]}]}' % (b"[" * 990 + b"]" * 990),
        50,
    ),
}  # fmt: skip


class Bystander(threading.Thread):
    """Another client."""

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__()
        self._base_url, self._model = base_url, model
        self.latencies_s: list[float] = []
        self.refused: list[int] = []
        self.done = threading.Event()
        self.was_there = threading.Event()  # often enough

    def run(self) -> None:
        with client_of("bystander", self._base_url) as client:
            while not self.done.wait(0.05):
                began_s = time.perf_counter()
                body = {"model": self._model, "prompt": "abc", "max_tokens": 2}
                status = client.post("/v1/completions", json=body).status_code
                self.latencies_s.append(time.perf_counter() - began_s)
                if status != 200:
                    self.refused.append(status)
                if len(self.latencies_s) >= NUM_ASKED:
                    self.was_there.set()


def settings_with(folder: Path, keys: bool) -> dict[str, str]:
    """Of a mesh that asks for keys, or of one that does not."""
    if not keys:
        return {"WORKER_ENGINE": "fake"}
    file = folder / "keys.toml"
    file.write_text("".join(entry_of(ApiKey(name=name, hash=hash_key(key))) for name, key in KEYS.items()))
    return {"WORKER_ENGINE": "fake", "SECURITY_API_KEYS_FILE": str(file)}


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def beside(mesh: RunningMesh, url: str, work: Callable[[Bystander], None]) -> Bystander:
    bystander = Bystander(url, mesh.model)
    bystander.start()
    try:
        work(bystander)
    finally:
        bystander.done.set()
        bystander.join()
    return bystander


def again_and_again(attack: Attack, url: str, port: int, bystander: Bystander) -> None:
    """The attack as often as it takes for the other client to have been there."""
    until_s = time.monotonic() + ATTACK_LIMIT_S
    attack(url, port)
    while not bystander.was_there.is_set() and time.monotonic() < until_s:
        attack(url, port)


def undisturbed(seconds: float, bystander: Bystander) -> None:
    """Nothing, for so long, and until the other client has been there often enough."""
    time.sleep(seconds)
    bystander.was_there.wait(ATTACK_LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of undisturbed requests before each attack")
    parser.add_argument("--keys", action="store_true", help="the attacker and the other client have keys")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    arguments = parser.parse_args()
    num_failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(Path(folder), model=None, settings=settings_with(Path(folder), arguments.keys)) as mesh,
    ):
        url = mesh.base_url.removesuffix("/v1")
        port = int(url.rpartition(":")[2])
        print(f"{'attack':32} {'worst before':>12} {'worst during':>12} {'refused':>8} {'of':>5} {'memory':>10}")
        for name, attack in ATTACKS.items():
            if arguments.only not in name:
                continue
            before = beside(mesh, url, partial(undisturbed, arguments.seconds))
            pid = next(pid for service, pid in mesh.pids().items() if service.startswith("gateway"))
            memory = memory_mib(pid)
            during = beside(mesh, url, partial(again_and_again, attack, url, port))
            same = pid in mesh.pids().values()
            growth = memory_mib(pid) - memory if same else float("inf")
            worst_before_s, worst_s = max(before.latencies_s), max(during.latencies_s, default=0.0)
            held = not during.refused and worst_s <= max(2 * worst_before_s, MAX_WORST_S) and growth <= MAX_GROWTH_MIB
            num_failed += not held
            print(
                f"{name:32} {1e3 * worst_before_s:9.0f} ms {1e3 * worst_s:9.0f} ms {len(during.refused):8} "
                f"{len(during.latencies_s):5} {growth:+6.0f} MiB  {'held' if held else 'FAILED'}",
                flush=True,
            )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
