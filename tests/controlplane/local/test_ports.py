"""Each address is chosen by one cluster only."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from controlplane.local import ports
from everstep.base.addresses import Ports
from everstep.errors import ClusterError

HOST = "127.0.0.1"
CLAIM = """
import sys
from controlplane.local import ports
claims = ports.Claims()
print(claims.claim(sys.argv[1], int(sys.argv[2])))
"""


def test_what_another_process_claims_is_not_chosen() -> None:
    with ports.Claims() as ours:
        port = ours.choose(HOST).port
        assert ours.claim(HOST, port)  # a claim of the same cluster succeeds again
        claim = [sys.executable, "-P", "-c", CLAIM, HOST, str(port)]
        assert subprocess.run(claim, check=True, capture_output=True, text=True).stdout == "False\n"
        with ports.Claims() as others:
            assert others.choose(HOST, preferred=port).port != port
    assert subprocess.run(claim, check=True, capture_output=True, text=True).stdout == "True\n"


def test_what_a_supervisor_owns_is_not_chosen() -> None:
    with ports.Claims() as up, ports.Claims("owned") as supervisor, ports.Claims() as another:
        port = up.choose(HOST).port
        assert supervisor.claim(HOST, port)  # the supervisor takes the port over while `up` still holds it
        assert not ports.Claims("owned").claim(HOST, port)
        up.__exit__(None, None, None)
        assert not another.claim(HOST, port)


def test_what_is_listened_to_is_not_chosen() -> None:
    with socket.create_server((HOST, 0)) as server, ports.Claims() as claims:
        port = server.getsockname()[1]
        assert claims.choose(HOST, preferred=port).port != port


def test_a_range_without_a_free_port_is_named() -> None:
    with ports.Claims() as claims, ports.Claims() as others:
        port = claims.choose(HOST).port
        with pytest.raises(ClusterError, match=f"no port is free on {HOST}: port {port} of {HOST} is taken"):
            others.choose(HOST, Ports(port, port))


def test_an_address_that_is_not_this_computer_s_has_no_port() -> None:
    with pytest.raises(ClusterError, match="no port is free"):
        ports.Claims().choose("192.0.2.1")
