"""Which interfaces and ports a job uses, according to NCCL's variables."""

from __future__ import annotations

import pytest

from agent.monitor.network.used import NcclNames, uses_interface, uses_port


@pytest.mark.parametrize(
    ("text", "named", "others"),
    [
        ("eth", ["eth0", "eth1"], ["ens1", "enx0a0b0c0d0e0f"]),
        ("eth0,ib", ["eth0", "eth01", "ib0"], ["eth1"]),
        ("=eth0", ["eth0"], ["eth01", "eth1"]),
        ("=eth0,eth1", ["eth0", "eth1"], ["eth2"]),
        ("^docker,lo", ["eth0", "docke"], ["docker0", "lo"]),
        ("^=docker0", ["docker1"], ["docker0"]),
        ("", ["eth0"], []),
    ],
)
def test_a_list_of_names_is_read_as_nccl_reads_it(text: str, named: list[str], others: list[str]) -> None:
    names = NcclNames.parse(text)
    assert [name for name in (*named, *others) if names.has(name)] == named


@pytest.mark.parametrize(
    ("text", "used", "unused"),
    [
        ("mlx5_1", [("mlx5_1", "1"), ("mlx5_1", "2"), ("mlx5_10", "1")], [("mlx5_2", "1")]),
        ("=mlx5_1:1,mlx5_2", [("mlx5_1", "1"), ("mlx5_2", "2")], [("mlx5_1", "2"), ("mlx5_10", "1")]),
        ("^mlx5_3", [("mlx5_1", "1")], [("mlx5_3", "1")]),
        ("^=mlx5_3:2", [("mlx5_3", "1"), ("mlx5_30", "2")], [("mlx5_3", "2")]),
    ],
)
def test_a_port_may_be_named(text: str, used: list[tuple[str, str]], unused: list[tuple[str, str]]) -> None:
    for port in used:
        assert uses_port(*port, [{"NCCL_IB_HCA": text}]) is True
    for port in unused:
        assert uses_port(*port, [{"NCCL_IB_HCA": text}]) is False


def test_ports_of_which_no_variable_says_anything() -> None:
    assert uses_port("mlx5_0", "1", []) is None
    assert uses_port("mlx5_0", "1", [{}]) is None
    assert uses_port("mlx5_0", "1", [{"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}]) is False
    assert uses_port("mlx5_0", "1", [{"NCCL_IB_HCA": "=mlx5_1"}, {"NCCL_IB_HCA": "mlx5"}]) is True, (
        "one of the two jobs uses the port"
    )


def test_interfaces_of_sockets() -> None:
    assert uses_interface("eth0", [{"NCCL_SOCKET_IFNAME": "=eth0"}])
    assert uses_interface("eth1", [{"GLOO_SOCKET_IFNAME": "eth0,eth1"}])
    assert not uses_interface("eth01", [{"GLOO_SOCKET_IFNAME": "eth0"}])
    assert not uses_interface("eth0", [{}]), "the agent's own interface is recognized in another way"


@pytest.mark.parametrize(("text", "is_used"), [("^docker,lo", False), ("enx", True)])
def test_a_usb_card_as_of_a_bmc_counts_only_where_it_is_named(text: str, is_used: bool) -> None:
    assert uses_interface("enxb03af2b6059f", [{"NCCL_SOCKET_IFNAME": text}]) is is_used
