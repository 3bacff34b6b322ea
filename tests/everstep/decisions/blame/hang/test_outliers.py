"""The ranks that differ from most of their peers."""

from __future__ import annotations

from everstep.decisions.blame.hang.outliers import find_outliers
from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang.made import COMPUTES, FIGURE_7, STUCK, SYNC, figure_7


def test_figure_7() -> None:
    found = find_outliers({rank: (activity,) for rank, activity in figure_7().items()}, Topology.parse(FIGURE_7))

    assert found.ranks == tuple(range(24, 32))
    assert found.undecided == ()
    assert [(group.ranks, group.dominant) for group in found.groups[:2]] == [
        (tuple(range(24)), True),
        ((24, 25, 26, 27), False),
    ]


def test_stages_may_differ() -> None:
    """Stage 0 waits, and stage 1 computes. In each stage, one rank differs from the others."""
    topology = Topology.of(8, 1, pp=2)
    doing = {rank: (SYNC if rank < 4 else COMPUTES,) for rank in range(8)} | {3: (STUCK,), 4: (STUCK,)}

    assert find_outliers(doing, topology).ranks == (3, 4)


def test_a_stage_without_a_majority_is_undecided() -> None:
    topology = Topology.of(4, 1)
    found = find_outliers({0: (COMPUTES,), 1: (COMPUTES,), 2: (STUCK,), 3: (SYNC,)}, topology)
    assert (found.ranks, found.undecided) == ((2, 3), ())  # half of all ranks compute, so this activity is dominant

    found = find_outliers({0: (COMPUTES,), 2: (STUCK,), 3: (SYNC,)}, topology)
    assert (found.ranks, found.undecided) == ((), (0, 2, 3))


def test_two_peers_are_no_majority() -> None:
    topology = Topology.of(4, 1, pp=2)
    doing = {0: (COMPUTES,), 1: (COMPUTES,), 2: (STUCK,), 3: (SYNC,)}
    found = find_outliers(doing, topology)
    assert (found.ranks, found.undecided) == ((), (2, 3))


def test_a_busy_helper_makes_a_difference() -> None:
    topology = Topology.of(4, 1)
    doing = dict.fromkeys(range(4), (SYNC,)) | {2: (SYNC, STUCK)}
    assert find_outliers(doing, topology).ranks == (2,)


def test_nothing_known() -> None:
    found = find_outliers({}, Topology.of(4, 1))
    assert (found.ranks, found.undecided, found.groups) == ((), (), ())
