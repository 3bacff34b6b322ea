"""The smallest parallel group that outliers share."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.decisions.blame.hang.shared_group import shared_group
from everstep.model.topology import Laid, Topology
from tests.everstep.decisions.blame.hang.made import FIGURE_7

FIGURE = Topology.parse(FIGURE_7)


def machines(outliers: list[int], topology: Topology) -> tuple[int, ...]:
    found = shared_group(outliers, topology)
    return found.group.machines if found else ()


def test_figure_7() -> None:
    found = shared_group(range(24, 32), FIGURE)
    assert found is not None
    assert (found.group.kind, found.group.machines) == ("pp", (12, 13, 14, 15))
    assert (found.alternatives, found.unexplained) == ((), ())


def test_outliers_of_one_machine_evict_that_machine_only() -> None:
    assert machines([24], FIGURE) == machines([24, 25], FIGURE) == (12,)


def test_outliers_on_two_machines_of_a_group_evict_the_group() -> None:
    assert machines([24, 31], FIGURE) == (12, 13, 14, 15)
    assert machines([0, 8], FIGURE) == (0, 4, 8, 12)  # of one stage: a dp group


def test_smallest_first() -> None:
    topology = Topology(16, 1, (("pp", 2), ("dp", 4), ("tp", 2)))
    assert machines([0, 1], topology) == (0, 1)
    assert machines([0, 2], topology) == (0, 2, 4, 6)


def test_groups_of_the_same_ranks_are_no_tie() -> None:
    topology = Topology(8, 2, (("dp", 4), ("pp", 4)))
    found = shared_group([0, 2], topology)
    assert found is not None
    assert found.group.machines == (0, 1)

    square = Topology(16, 1, (("dp", 4), ("pp", 4)), (Laid("ep", 4, ("pp",)),))
    found = shared_group([0, 1], square)
    assert found is not None
    assert (found.group.kind, found.alternatives) == ("ep", ())


def test_a_tie_of_two_groups() -> None:
    topology = Topology(16, 1, (("dp", 4), ("tp", 4)), (Laid("ep", 4, ("dp", "tp")),))
    found = shared_group([0, 1], topology)
    assert found is not None
    assert found.group.machines == (0, 1, 2, 3)

    crossed = Topology(12, 1, (("pp", 3), ("dp", 2), ("tp", 2)), (Laid("ep", 2, ("tp", "pp")),))
    found = shared_group([0, 4], crossed)
    assert found is not None
    assert found.group.kind in ("ep", "pp")


def test_laid_groups_count() -> None:
    topology = Topology(16, 1, (("dp", 8), ("tp", 2)), (Laid("ep", 4, ("dp", "tp")),))
    found = shared_group([1, 2], topology)
    assert found is not None
    assert (found.group.kind, found.group.machines) == ("ep", (0, 1, 2, 3))


def test_a_complete_replica() -> None:
    """If a replica hangs whose tensor parallel groups span machines, no group of one kind has all outliers."""
    topology = Topology(16, 1, (("dp", 4), ("pp", 2), ("tp", 2)))
    found = shared_group([4, 5, 6, 7], topology)
    assert found is not None
    assert (found.group.kind, found.group.machines) == ("pp+tp", (4, 5, 6, 7))


def test_no_group_is_more_than_half_of_the_job() -> None:
    assert shared_group([0, 1, 2, 3], Topology(4, 1, (("dp", 4),))) is None
    assert shared_group([0, 3], Topology(4, 1, (("dp", 2), ("pp", 2)))) is None


def test_no_outliers() -> None:
    assert shared_group([], FIGURE) is None


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in ("pp", "dp", "tp", "cp")}
    order = draw(st.permutations(sorted(sizes)))
    world = sizes["pp"] * sizes["dp"] * sizes["tp"] * sizes["cp"]
    per_machine = draw(st.sampled_from([one for one in (1, 2, 4, 8) if world % one == 0]))
    return Topology(world // per_machine, per_machine, tuple((axis, sizes[axis]) for axis in order))


@given(st.data())
def test_any_group_is_found_in_any_order(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    kind = data.draw(st.sampled_from(topology.kinds))
    group = data.draw(st.sampled_from(topology.groups(kind)))
    theirs = {topology.machine(rank) for rank in group}
    assume(len(theirs) <= max(1, topology.machines // 2))

    found = shared_group(group, topology)

    assert found is not None
    assert set(found.group.machines) == theirs
    assert found.unexplained == ()
    assert shared_group(data.draw(st.permutations(group)), topology) == found


@given(st.data())
def test_a_group_and_one_outlier_elsewhere(data: st.DataObject) -> None:
    """The result is the group without the other outlier, or a larger group with both."""
    topology = data.draw(topologies())
    kind = data.draw(st.sampled_from(topology.kinds))
    group = data.draw(st.sampled_from(topology.groups(kind)))
    theirs = {topology.machine(rank) for rank in group}
    assume(3 <= len(theirs) <= topology.machines // 2)
    others = [rank for rank in range(topology.world_size) if topology.machine(rank) not in theirs]
    noise = data.draw(st.sampled_from(others))

    found = shared_group([*group, noise], topology)

    assert found is not None
    if any(set(group.machines) == theirs for group in found.alternatives):
        return  # the other outlier completes another group
    assert theirs <= set(found.group.machines)
    assert found.unexplained in ((), (noise,))
    assert (topology.machine(noise) in found.group.machines) == (found.unexplained == ())


@given(st.data())
def test_no_smaller_group_of_one_kind_has_all_outliers(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    ranks = st.integers(0, topology.world_size - 1)
    outliers = data.draw(st.lists(ranks, min_size=1, max_size=4, unique=True))
    theirs = {topology.machine(rank) for rank in outliers}

    found = shared_group(outliers, topology)

    sizes = [
        len(held)
        for kind in topology.kinds
        for one in topology.groups(kind)
        if theirs <= (held := {topology.machine(rank) for rank in one})
    ]
    if found and not found.unexplained and len(theirs) > 1 and sizes:
        assert len(found.group.machines) <= min(sizes)
    if found and not found.unexplained:
        assert theirs <= set(found.group.machines)
