"""Laws of the map rank ↔ coordinate ↔ machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import TopologyError
from everstep.model.topology import AXES, Axis, Coordinate, Topology

orders = st.permutations(AXES).map(tuple)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp, pp, dp = (draw(st.integers(1, 4)) for _ in range(3))
    world = tp * pp * dp
    per_machine = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return Topology(world // per_machine, per_machine, tp, pp, draw(orders))


@given(topologies())
def test_rank_and_coordinate_are_inverse(topology: Topology) -> None:
    places = {topology.coordinate(rank) for rank in range(topology.world_size)}
    assert len(places) == topology.world_size
    assert all(topology.rank(topology.coordinate(rank)) == rank for rank in range(topology.world_size))


@given(topologies(), st.sampled_from(AXES))
def test_groups_partition_the_ranks(topology: Topology, axis: Axis) -> None:
    groups = topology.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    assert {len(group) for group in groups} == {topology.size(axis)}
    for group in groups:
        assert all(topology.group(rank, axis) == group for rank in group)


@given(topologies())
def test_two_groups_of_different_kind_share_one_rank_at_most(topology: Topology) -> None:
    for rank in range(topology.world_size):
        groups = [set(topology.group(rank, axis)) for axis in AXES]
        assert groups[0] & groups[1] == groups[1] & groups[2] == groups[0] & groups[2] == {rank}


@given(topologies())
def test_machines_partition_the_ranks(topology: Topology) -> None:
    seen = [rank for machine in range(topology.machines) for rank in topology.ranks(machine)]
    assert seen == list(range(topology.world_size))
    assert all(rank in topology.ranks(topology.machine(rank)) for rank in seen)


def test_figure_7_of_the_paper() -> None:
    """TP 2, PP 4, DP 4, two ranks per machine, order dp-pp-tp (ByteRobust, figure 7)."""
    topology = Topology(machines=16, ranks_per_machine=2, tp=2, pp=4, order=("dp", "pp", "tp"))
    assert topology.dp == 4
    assert topology.group(0, "tp") == (0, 1)
    assert topology.group(0, "pp") == (0, 2, 4, 6)
    assert topology.group(0, "dp") == (0, 8, 16, 24)
    assert topology.coordinate(31) == Coordinate(tp=1, pp=3, dp=3)
    # A pipeline fills four machines, and a tensor-parallel group one.
    assert {topology.machine(rank) for rank in topology.group(9, "pp")} == {4, 5, 6, 7}
    assert all(len({topology.machine(rank) for rank in group}) == 1 for group in topology.groups("tp"))


def test_the_default_order_is_that_of_init_device_mesh() -> None:
    topology = Topology(machines=4, ranks_per_machine=2, tp=2, pp=2)
    assert topology.mesh_shape() == (2, 2, 2)
    mesh = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # arange(8) in shape (pp, dp, tp)
    for pp in range(2):
        for dp in range(2):
            for tp in range(2):
                assert topology.rank(Coordinate(tp=tp, pp=pp, dp=dp)) == mesh[pp][dp][tp]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"machines": 0, "ranks_per_machine": 2}, "machines is 0"),
        ({"machines": 3, "ranks_per_machine": 2, "tp": 4}, "6 ranks cannot be split into tp 4 x pp 1"),
        ({"machines": 2, "ranks_per_machine": 2, "order": ("tp", "tp", "dp")}, "must name tp, pp and dp once"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(**sizes)  # type: ignore[arg-type]


def test_places_that_do_not_exist_are_named() -> None:
    topology = Topology(machines=2, ranks_per_machine=2, tp=2)
    for call in (
        lambda: topology.coordinate(4),
        lambda: topology.machine(-1),
        lambda: topology.ranks(2),
        lambda: topology.rank(Coordinate(tp=2, pp=0, dp=0)),
    ):
        with pytest.raises(TopologyError, match="does not exist"):
            call()


@given(topologies())
def test_a_topology_reads_its_own_line(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize("text", ["", "1,1,1,pp-dp-tp", "1,1,1,one,pp-dp-tp", "1,1,1,1,pp-dp", "2,1,3,1,pp-dp-tp"])
def test_a_line_that_is_no_topology_is_named(text: str) -> None:
    with pytest.raises(TopologyError):
        Topology.parse(text)
