"""Addresses of this machine, IPv4 and IPv6, and what listens on them."""

import asyncio
import socket

import pytest
from torch.distributed import TCPStore

from paceline.control.network import (
    address_toward,
    bound_socket,
    interface_of,
    join_address,
    split_address,
)
from paceline.control.probe import Prober, answer_probes
from paceline.runtime.recovery.groups import Groups, listen_for_store


def has_ipv6() -> bool:
    try:
        bound_socket("::1", 0).close()
    except OSError:
        return False
    return True


LOOPBACKS = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
]


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7.example", "::1", "fe80::1%eth0"])
def test_an_address_is_read_as_it_was_written(host):
    assert split_address(join_address(host, 4711)) == (host, 4711)


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_loopback_is_reached_from_itself_over_its_own_interface(host):
    assert address_toward(host) == host
    assert interface_of(host) in ("lo", "lo0")


def test_a_host_with_both_families_is_reached_over_ipv4(monkeypatch):
    def both(host, port, **options):
        found = [(socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port))]
        return [(family, socket.SOCK_STREAM, 6, "", place) for family, place in found]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert address_toward("both") == "127.0.0.1"


def test_an_interface_is_found_by_its_ipv6_address(monkeypatch, tmp_path):
    listed = tmp_path / "if_inet6"
    listed.write_text("fd000000000000000000000000000002 04 40 00 82     eth7\n")
    monkeypatch.setattr("paceline.control.network._INTERFACES_6", listed)
    assert interface_of("fd00::2") == "eth7"
    assert interface_of("fd00::3") is None


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_probe_is_answered(host):
    async def ask() -> int:
        answered = asyncio.get_running_loop().create_future()
        transport, prober = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: Prober(answered.set_result), local_addr=(host, 0)
        )
        try:
            prober.ask(3, host, answer_probes(host))
            return await asyncio.wait_for(answered, 60)
        finally:
            transport.close()

    assert asyncio.run(ask()) == 3


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_worker_serves_its_store_on_its_own_address(host):
    groups = Groups(backend="gloo", listener=listen_for_store(0, host))
    store = TCPStore(*groups.address, None, False)
    store.set("word", "heard")
    assert groups.address[0] == host
    assert store.get("word") == b"heard"
