"""Addresses as another service sees them, on loopback."""

import socket
from dataclasses import replace

import pytest

from pdmesh.config import GatewayConfig, MeshConfig
from pdmesh.errors import ConfigError
from pdmesh.wire.dialing import is_refused, is_wildcard, own_host_towards, split_address
from pdmesh_gateway.main import token_host_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("scheduler:7000", ("scheduler", 7000)),
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("[fd00::1]:7000", ("fd00::1", 7000)),
        ("dns:///scheduler:7000", ("scheduler", 7000)),
        ("ipv4:10.0.0.1:7000,10.0.0.2:7000", ("10.0.0.1", 7000)),
        ("ipv6:[fd00::1]:7000", ("fd00::1", 7000)),
    ],
)
def test_an_address_is_split_as_grpc_reads_it(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "scheduler", ":7000", "scheduler:seven"])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|invalid literal"):
        split_address(address)


def test_a_wildcard_is_no_address_to_dial() -> None:
    assert all(map(is_wildcard, ["0.0.0.0", "::", ""]))
    assert not is_wildcard("127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "no.such.name.invalid:7000", "7000"])
def test_an_own_address_that_others_cannot_dial_is_none(address: str) -> None:
    with pytest.raises(ConfigError):
        own_host_towards(address)


async def test_a_process_that_ended_refuses_connections() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert await is_refused(address)
        listener.listen()
        assert not await is_refused(address)
    assert not await is_refused("nonsense")


def test_a_gateway_does_not_tell_workers_a_wildcard() -> None:
    """It used to: /ready said yes, and every request hung, since 0.0.0.0 is a worker's own host."""
    config = MeshConfig(scheduler_address="127.0.0.1:7000", gateway=GatewayConfig(token_host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"set gateway\.token_address"):
        token_host_of(config)
    named = GatewayConfig(token_host="0.0.0.0", token_address="gateway:7100")
    assert token_host_of(replace(config, gateway=named)) == "0.0.0.0"  # what is named counts
    assert token_host_of(replace(config, gateway=GatewayConfig(token_host="10.0.0.1"))) == "10.0.0.1"
