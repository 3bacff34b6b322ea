"""Which ranks of a job are on which machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import TopologyError
from everstep.model.machine import Assignment
from everstep.model.topology import Topology


@given(st.integers(1, 20), st.integers(1, 8))
def test_every_rank_has_one_home_and_every_machine_its_ranks(machines: int, ranks: int) -> None:
    names = [f"m{index}" for index in range(machines)]
    assignment = Assignment(Topology.of(machines, ranks), names)

    homes = assignment.homes()
    assert sorted(homes) == list(range(machines * ranks))
    assert all(assignment.home(rank) == home for rank, home in homes.items())
    assert {machine: list(of) for machine, of in assignment.each()} == {
        name: [rank for rank, home in homes.items() if home == name] for name in names
    }


def test_a_rank_that_does_not_exist_has_no_home() -> None:
    with pytest.raises(TopologyError, match="rank 4 does not exist"):
        Assignment(Topology.of(2, 2), ["a", "b"]).home(4)
