"""What a newcomer's machine may lack: each is done without, or told in one sentence that says what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import grpc
import httpx
import pytest

from pdmesh.cli.http import Target
from pdmesh.cli.preflight import check_checkpoint, check_loopback, check_machine, check_thread_limit
from pdmesh.cli.state_folder import StateFolder, state_root
from pdmesh.config import MeshConfig, SecurityConfig, TransferConfig
from pdmesh.engine.architectures import parse_model_config
from pdmesh.errors import ConfigError
from pdmesh.service import raise_descriptor_limit
from pdmesh.transport import reading
from pdmesh.transport.reading import why_unreadable
from pdmesh.transport.ucx_api import names_shared_memory, ucx_devices, ucx_tls
from pdmesh.wire.endpoint import bind_socket, open_channel, serving
from pdmesh.worker.engines import check_memory
from pdmesh.worker.runtime import process_number, transfer_for
from pdmesh_testing.checkpoints import write_checkpoint


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of a machine on which nothing else can be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    return tmp_path


def test_the_state_is_below_the_home_unless_told_otherwise(tmp_path: Path) -> None:
    assert state_root({"HOME": str(tmp_path)}) == tmp_path / ".local/state/pdmesh"
    assert state_root({"HOME": str(tmp_path), "XDG_STATE_HOME": "/s"}) == Path("/s/pdmesh")


@pytest.mark.parametrize("home", ["/proc/nobody", "~"])
def test_without_a_home_the_state_is_in_a_private_temporary_folder(temporary: Path, home: str) -> None:
    root = state_root({"HOME": home})
    assert root == temporary / f"pdmesh-{os.geteuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
    assert state_root({"HOME": home}) == root, "every command finds the same"


def linked_elsewhere(root: Path) -> None:
    root.symlink_to(root.parent)


def open_to_all(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


@pytest.mark.parametrize("take", [linked_elsewhere, open_to_all])
def test_a_temporary_folder_that_others_can_change_is_refused(temporary: Path, take: Callable[[Path], None]) -> None:
    take(temporary / f"pdmesh-{os.geteuid()}")
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME to a folder of your own"):
        state_root({"HOME": "/proc/nonexistent"})


def test_where_nothing_can_be_written_the_state_folder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    root = state_root({"HOME": "/proc/nonexistent"})
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME to another folder"), StateFolder("x", root / "x").lock():
        pass


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (
            errno.EADDRINUSE,
            "another process uses it; stop that (`pdmesh down` if it is a mesh), or set a.port to another",
        ),
        (errno.EACCES, "ports below 1024 need root on most machines; set a.port to a higher one"),
        (
            errno.EADDRNOTAVAIL,
            "no network interface of this machine has that address; set the host beside a.port",
        ),
        (errno.EAFNOSUPPORT, "this system has no IPv6; set the host beside a.port"),
    ],
)
def test_a_port_that_cannot_be_had_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError) as failure:
        bind_socket("::1", 80, setting="a.port")
    assert str(failure.value).startswith(f"cannot listen on [::1]:80: {os.strerror(number)}; {told}")


def test_where_no_process_may_read_another_kv_goes_through_ucx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = tmp_path / "ptrace_scope"
    for value, is_readable in (("1", True), ("3", False)):
        scope.write_text(f"{value}\n")
        assert (why_unreadable(scope) is None) == is_readable
    config = TransferConfig()
    assert transfer_for("cpu", config, None) == config
    assert transfer_for("cpu", config, None, 3 << 20).max_payload_bytes == 3 << 20  # a page with states
    told = transfer_for("cpu", config, why_unreadable(scope))
    assert not names_shared_memory(ucx_tls(told))
    assert ucx_devices(told) == "lo"

    def refused(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(reading, "_libc", SimpleNamespace(process_vm_readv=refused))
    assert "seccomp" in str(why_unreadable(tmp_path / "no-yama"))


@pytest.mark.anyio
async def test_services_find_each_other_beside_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC asks the proxy of the environment for any address but those of ``no_proxy``."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def echo(request: bytes, _context: Any) -> bytes:
            return request

        methods: Any = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        security = SecurityConfig()
        with anyio.fail_after(30):
            async with (
                serving("test.Echo", methods, host="127.0.0.1", port=0, security=security) as port,
                open_channel(f"127.0.0.1:{port}", security) as channel,
            ):
                assert await channel.unary_unary("/test.Echo/Echo")(b"there") == b"there"


def test_a_mesh_without_room_for_its_threads_is_refused() -> None:
    check_thread_limit(5, None)
    check_thread_limit(5, 75)
    with pytest.raises(ConfigError, match=r"only 74 more processes .* takes about 75: raise the limit"):
        check_thread_limit(5, 74)


def test_a_machine_that_cannot_reach_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine(MeshConfig(), num_processes=5)

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(
        ConfigError, match=r"cannot connect to itself at 127\.0\.0\.1, .* Network is unreachable; bring"
    ):
        check_loopback("127.0.0.1")


def test_a_process_that_may_open_too_few_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (24, 24))
    with pytest.raises(ConfigError, match="may open only 24 files: raise the limit to 64 or more"):
        raise_descriptor_limit()


def checkpoint(folder: Path, *, without: str = "") -> Path:
    """A whole one but for the file ``without``."""
    directory = write_checkpoint(folder / "model")
    if without:
        (directory / without).unlink()
    return directory


def test_a_whole_checkpoint_is_no_mistake(tmp_path: Path) -> None:
    check_checkpoint(MeshConfig(), checkpoint(tmp_path), num_instances=2)


@pytest.mark.parametrize(
    ("missing", "instead", "told"),
    [
        ("config.json", "", "config.json is missing"),
        ("tokenizer.json", "", "has no tokenizer.json: save the checkpoint with its fast tokenizer"),
        ("model.safetensors", "", "download all files of the model"),
        ("model.safetensors", "pytorch_model.bin", "but pytorch_model.bin: save the checkpoint as safetensors"),
    ],
)
def test_an_incomplete_checkpoint_is_told_before_anything_starts(
    tmp_path: Path, missing: str, instead: str, told: str
) -> None:
    directory = checkpoint(tmp_path, without=missing)
    if instead:
        (directory / instead).touch()
    with pytest.raises(ConfigError) as failure:
        check_checkpoint(MeshConfig(), directory, num_instances=2)
    assert told in str(failure.value)


def test_a_pointer_of_git_lfs_is_not_taken_for_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match="run `git lfs pull`"):
        check_checkpoint(MeshConfig(), directory, num_instances=2)


def test_a_model_too_large_for_memory_is_refused() -> None:
    model = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
            "torch_dtype": "bfloat16",
        },
        "config.json",
    )
    layout = model.kv_layout(dtype="auto", block_size=16)
    check_memory(model, layout, num_instances=2, free_bytes=26 << 30)
    check_memory(model, layout, num_instances=2, free_bytes=None)
    with pytest.raises(ConfigError, match=r"take 12\.3 GiB in bfloat16, in each of 2 instances, and 24\.0 GiB"):
        check_memory(model, layout, num_instances=2, free_bytes=24 << 30)


@pytest.mark.parametrize(("url", "num_proxies"), [("http://127.0.0.1:8000", 0), ("http://elsewhere:8000", 1)])
def test_a_proxy_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, num_proxies: int
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    target = Target(MeshConfig(), StateFolder("x", tmp_path), url)
    with target.client(read_timeout_s=1.0) as client:
        proxied = client._transport_for_url(httpx.URL(url)) is not client._transport
    assert proxied == bool(num_proxies)


@pytest.mark.parametrize(
    ("pid", "parent", "first", "number"),
    [
        (1, 0, "python", 1_700_000_000),
        (7, 1, "docker-init", 1_700_000_000),
        (7, 1, "systemd", 7),
        (7, 1, "pdmesh", 7),
        (77, 5, "docker-init", 77),
    ],
)
def test_a_process_that_follows_another_in_a_container_has_another_number(
    pid: int, parent: int, first: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(Path, "read_text", lambda _path: f"{first}\n")
    assert process_number(1_700_000_000.5) == number
