"""Laws of the map between ranks, coordinates and machines."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import TopologyError
from everstep.model.topology import AXES, Laid, Topology, parse_laid, parse_mesh

orders = st.permutations(AXES).map(tuple)


@st.composite
def short(draw: st.DrawFn) -> Topology:
    tp, pp, dp = (draw(st.integers(1, 4)) for _ in range(3))
    world = tp * pp * dp
    per_machine = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return Topology.of(world // per_machine, per_machine, tp, pp, draw(orders))


@st.composite
def meshes(draw: st.DrawFn) -> Topology:
    """Draw a topology with any axes and with laid groups."""
    names = draw(st.permutations(["pp", "dp_replicate", "dp_shard", "cp", "tp", "my_axis"]))
    mesh = tuple((name, draw(st.integers(1, 3))) for name in names[: draw(st.integers(1, 5))])
    world = prod(size for _, size in mesh)
    per_machine = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    laid = []
    for name in draw(st.sampled_from([(), ("ep",), ("ep", "etp")])):
        over = draw(st.lists(st.sampled_from([axis for axis, _ in mesh]), min_size=1, unique=True))
        ranks = prod(size for axis, size in mesh if axis in over)
        size = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        laid.append(Laid(name, size, tuple(over)))
    return Topology(world // per_machine, per_machine, mesh, tuple(laid))


topologies = st.one_of(short(), meshes())


@given(topologies)
def test_rank_and_place_are_inverse(topology: Topology) -> None:
    places = [dict(topology.coordinate(rank).places) for rank in range(topology.world_size)]
    assert [topology.rank_at(**place) for place in places] == list(range(topology.world_size))
    assert all(topology.coordinate(rank)[axis] == at for rank, place in enumerate(places) for axis, at in place.items())


@given(topologies)
def test_groups_of_each_kind_partition_the_ranks(topology: Topology) -> None:
    for kind in topology.kinds:
        groups = topology.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {topology.size(kind)}
        assert all(tuple(sorted(group)) == group for group in groups)
        for group in groups:
            assert all(topology.group(rank, kind) == group for rank in group)


@given(topologies)
def test_groups_along_two_axes_share_one_rank(topology: Topology) -> None:
    for rank in range(topology.world_size):
        for one, other in combinations(topology.axes, 2):
            assert set(topology.group(rank, one)) & set(topology.group(rank, other)) == {rank}


@given(topologies)
def test_a_laid_group_extends_only_along_its_axes(topology: Topology) -> None:
    for laid in topology.laid:
        for rank in range(topology.world_size):
            assert set(topology.group(rank, laid.name)) <= set(topology.along(rank, laid.over))


@given(topologies)
def test_ranks_are_data_parallel_to_those_with_another_index(topology: Topology) -> None:
    for rank in range(topology.world_size):
        replicas = topology.along(rank, topology.data_axes)
        assert [topology.coordinate(other).dp for other in replicas] == list(range(topology.dp))


@given(topologies)
def test_machines_partition_the_ranks(topology: Topology) -> None:
    seen = [rank for machine in range(topology.machines) for rank in topology.ranks(machine)]
    assert seen == list(range(topology.world_size))
    assert all(rank in topology.ranks(topology.machine(rank)) for rank in seen)


def test_figure_7_of_the_paper() -> None:
    """TP 2, PP 4, DP 4, two ranks per machine, order dp-pp-tp (ByteRobust, figure 7)."""
    topology = Topology.of(machines=16, ranks_per_machine=2, tp=2, pp=4, order=("dp", "pp", "tp"))
    assert topology.dp == 4
    assert topology.group(0, "tp") == (0, 1)
    assert topology.group(0, "pp") == (0, 2, 4, 6)
    assert topology.group(0, "dp") == (0, 8, 16, 24)
    last = topology.coordinate(31)
    assert (last.tp, last.pp, last.dp) == (1, 3, 3)
    # A pipeline is on four machines, and a tensor-parallel group on one.
    assert {topology.machine(rank) for rank in topology.group(9, "pp")} == {4, 5, 6, 7}
    assert all(len({topology.machine(rank) for rank in group}) == 1 for group in topology.groups("tp"))


def test_the_default_order_is_that_of_init_device_mesh() -> None:
    topology = Topology.of(machines=4, ranks_per_machine=2, tp=2, pp=2)
    assert topology.mesh_shape() == (2, 2, 2)
    mesh = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]  # arange(8) in shape (pp, dp, tp)
    for pp in range(2):
        for dp in range(2):
            for tp in range(2):
                assert topology.rank_at(tp=tp, pp=pp, dp=dp) == mesh[pp][dp][tp]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"machines": 0, "ranks_per_machine": 2}, "machines is 0"),
        ({"machines": 3, "ranks_per_machine": 2, "tp": 4}, "6 ranks cannot be split into tp 4 x pp 1"),
        ({"machines": 2, "ranks_per_machine": 2, "order": ("tp", "tp", "dp")}, "must name tp, pp and dp once"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.of(**sizes)  # type: ignore[arg-type]


def test_ranks_and_places_that_do_not_exist_are_named() -> None:
    topology = Topology.of(machines=2, ranks_per_machine=2, tp=2)
    for call in (
        lambda: topology.coordinate(4),
        lambda: topology.machine(-1),
        lambda: topology.ranks(2),
        lambda: topology.rank_at(tp=2),
    ):
        with pytest.raises(TopologyError, match="does not exist"):
            call()


@given(topologies)
def test_a_topology_is_parsed_from_its_text(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize("text", ["", "1,1,1,pp-dp-tp", "1,1,1,one,pp-dp-tp", "1,1,1,1,pp-dp", "2,1,3,1,pp-dp-tp"])
def test_text_that_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(TopologyError):
        Topology.parse(text)


def test_expert_parallel_groups_are_laid_over_shards_and_tensors() -> None:
    """Two pipeline stages of 8 ranks each, with dp_shard 4 and tp 2; experts are split over 4 ranks of a stage."""
    topology = Topology.parse("4,4,pp=2,dp_shard=4,tp=2,ep=4:dp_shard+tp")

    assert topology.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert topology.text == "pp 2, dp_shard 4, tp 2, ep 4 over dp_shard and tp"
    assert topology.kinds == ("pp", "dp_shard", "tp", "ep")


def test_a_group_can_be_laid_over_axes_that_are_not_adjacent() -> None:
    topology = Topology.parse("4,2,dp_shard=2,pp=2,tp=2,ep=4:tp+dp_shard")

    assert topology.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_hybrid_sharding_is_the_mesh_that_torch_makes() -> None:
    topology = Topology(4, 2, (("dp_replicate", 2), ("dp_shard", -1)))

    assert topology.mesh_shape() == (2, 4)
    assert (topology.dp, topology.tp, topology.pp, topology.data_axes) == (8, 1, 1, ("dp_replicate", "dp_shard"))
    assert topology.group(5, "dp_shard") == (4, 5, 6, 7)
    assert topology.group(5, "dp_replicate") == (1, 5)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((), "no axes"),
        ((("DP", 8),), "'DP' is not the name of an axis"),
        ((("dp", 2), ("dp", 4)), "dp is in the mesh twice"),
        ((("dp", 0),), "dp is 0; it must be at least 1"),
        ((("dp", -1), ("tp", -1)), "tp is -1; it must be at least 1, or -1 for one axis"),
        ((("dp", 4),), "8 ranks cannot be split into dp 4"),
        ((("dp", -1), ("tp", 3)), "8 ranks cannot be split into dp -1 x tp 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(4, 2, mesh)


@pytest.mark.parametrize(
    ("laid", "message"),
    [
        ("ep=3:dp", "ep 3 cannot be laid over dp"),
        ("ep=8:dp+dp", "ep is laid over an axis twice"),
        ("ep=2:cp", "ep is laid over cp: the mesh has dp"),
        ("dp=2:dp", "dp is in the mesh twice"),
        ("ep=two:dp", "is not a laid group"),
        ("ep=2", "is not a laid group"),
    ],
)
def test_a_group_that_cannot_be_laid_is_refused(laid: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology(4, 2, (("dp", 8),), (parse_laid(laid),))


def test_a_mesh_on_the_command_line() -> None:
    assert list(parse_mesh("pp=2,dp_shard=-1,tp=2").items()) == [("pp", 2), ("dp_shard", -1), ("tp", 2)]
    for wrong in ("", "pp", "pp=", "pp=two", "pp=2,pp=2"):
        with pytest.raises(TopologyError):
            parse_mesh(wrong)


def test_an_unknown_kind_of_group_is_refused() -> None:
    with pytest.raises(TopologyError, match="there are no cp groups: the mesh has pp, dp, tp"):
        Topology.of(2, 2).groups("cp")


def test_laid_groups_do_not_change_the_places_of_ranks() -> None:
    topology = Topology.parse("4,2,dp=2,pp=2,tp=2,ep=4:dp+tp")

    assert topology.same_numbering("4,2,2,2,dp-pp-tp")
    assert Topology.parse("4,2,2,2,dp-pp-tp").same_numbering(str(topology))
    for other in ("4,2,2,2,pp-dp-tp", "8,1,2,2,dp-pp-tp", "4,2,dp=4,pp=2", "of a later release"):
        assert not topology.same_numbering(other)
