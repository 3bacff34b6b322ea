"""The groups of a dual-phase replay: the paper's formulas, and laws for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.replay.groups import ReplayPlan, group_size, plan_replay, replica_machines
from everstep.errors import TopologyError
from everstep.model.topology import Topology

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 12))


def names(plan: ReplayPlan) -> dict[str, tuple[int, ...]]:
    return {group.name: group.machines for group in plan.groups}


def test_the_papers_figure_6() -> None:
    found = plan_replay(24, 4)

    assert (found.size, found.count) == (4, 6)
    assert names(found)["row 3"] == (12, 13, 14, 15)
    assert names(found)["column 1"] == (1, 7, 13, 19)


@given(SIZES)
def test_if_machines_divide_the_groups_are_those_of_algorithm_1(sizes: tuple[int, int]) -> None:
    m, n = sizes
    found = plan_replay(m * n, m)

    assert (found.size, found.count) == (m, n)
    for a in range(n):
        assert names(found)[f"row {a}"] == tuple(x for x in range(m * n) if x // m == a)
        assert names(found)[f"column {a}"] == tuple(x for x in range(m * n) if x % n == a)
    assert [len(phase.waves) for phase in found.phases] == [1, 1], "all groups of a phase run at once"


@given(st.integers(1, 60), st.integers(1, 60))
def test_every_machine_is_in_a_group_of_full_size_in_each_phase_and_in_one_at_a_time(machines: int, size: int) -> None:
    if size > machines:
        with pytest.raises(TopologyError, match="not possible"):
            plan_replay(machines, size)
        return
    for phase in plan_replay(machines, size).phases:
        assert all(len(set(group.machines)) == size for group in phase.groups)
        own = [x for group in phase.groups for x in group.machines if x not in group.filled]
        assert sorted(own) == list(range(machines))
        for wave in phase.waves:
            together = [x for group in wave for x in group.machines]
            assert len(together) == len(set(together))
        if machines % size == 0:
            assert len(phase.waves) == 1


@given(st.integers(1, 200), st.integers(1, 20))
def test_the_size_of_a_group_is_the_largest_that_names_one_machine(machines: int, unit: int) -> None:
    if machines < unit:
        with pytest.raises(TopologyError, match="too few"):
            group_size(machines, unit)
        return
    size = group_size(machines, unit)

    assert size % unit == 0
    fitting = [m for m in range(unit, machines + 1, unit) if machines % m == 0 and m <= machines // m]
    assert size == max(fitting, default=unit)


@pytest.mark.parametrize(
    ("topology", "machines"),
    [
        ("16,2,2,4,dp-pp-tp", 4),  # figure 7: one TP group on a machine
        ("4,8,2,2,pp-dp-tp", 1),  # two replicas on a machine
        ("8,4,2,4,pp-dp-tp", 2),  # two TP groups on a machine
        ("3,4,3,2,pp-dp-tp", 3),  # a replica ends within a machine
        ("8,2,4,2,pp-dp-tp", 4),  # a TP group has two machines
        ("5,1,1,1,pp-dp-tp", 1),
        ("8,2,pp=2,dp_replicate=2,dp_shard=2,tp=2", 2),  # both data axes shrink
        ("8,2,pp=2,cp=2,dp=2,tp=2", 4),  # cp stays
        ("8,1,dp=8,ep=4:dp", 4),  # groups of experts are not divided
    ],
)
def test_machines_of_a_replica(topology: str, machines: int) -> None:
    assert replica_machines(Topology.parse(topology)) == machines
