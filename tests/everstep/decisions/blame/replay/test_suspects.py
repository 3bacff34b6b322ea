"""The suspects of a replay: the machine at fault is among them for every size, and it is the only one if m ≤ n."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.replay.groups import ReplayPlan, plan_replay
from everstep.decisions.blame.replay.suspects import Suspects, miss_probability, not_reproduced, runs_needed, suspects
from everstep.model.replay import ReplayConclusion

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def shown(plan: ReplayPlan, *bad: int) -> dict[str, bool | None]:
    """Return the result if every group with one of the bad machines shows a fault."""
    return {group.name: not set(bad).isdisjoint(group.machines) for group in plan.groups}


def test_the_papers_figure_6_names_machine_13() -> None:
    plan = plan_replay(24, 4)
    seen = dict.fromkeys(shown(plan), False) | {"row 3": True, "column 1": True}

    assert seen == shown(plan, 13)
    assert suspects(plan, seen) == Suspects(ReplayConclusion.ONE, (13,))


@given(SIZES, st.data())
def test_one_machine_at_fault_is_named_alone_if_and_only_if_m_is_at_most_n(
    sizes: tuple[int, int], data: st.DataObject
) -> None:
    m, n = sizes
    plan, bad = plan_replay(m * n, m), data.draw(st.integers(0, m * n - 1))
    found = suspects(plan, shown(plan, bad))

    same = {x for x in range(m * n) if x // m == bad // m and x % n == bad % n}
    assert (found.conclusion, set(found.machines)) == (ReplayConclusion.ONE, same)
    assert len(same) <= -(-m // n)
    if m <= n:
        assert found.machines == (bad,)
    else:
        assert max(len(suspects(plan, shown(plan, x)).machines) for x in range(m * n)) == -(-m // n) > 1


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_also_where_machines_do_not_divide(machines: int, size: int, data: st.DataObject) -> None:
    size = min(size, machines)
    plan, bad = plan_replay(machines, size), data.draw(st.integers(0, machines - 1))
    found = suspects(plan, shown(plan, bad))

    assert found.conclusion is ReplayConclusion.ONE
    assert bad in found.machines


@given(SIZES, st.data())
def test_several_at_fault_are_all_among_the_suspects(sizes: tuple[int, int], data: st.DataObject) -> None:
    m, n = sizes
    plan = plan_replay(m * n, m)
    bad = data.draw(st.sets(st.integers(0, m * n - 1), min_size=1, max_size=3))
    found = suspects(plan, shown(plan, *bad))

    rows, columns = {x // m for x in bad}, {x % n for x in bad}
    assert set(found.machines) <= {x for x in range(m * n) if x // m in rows and x % n in columns}
    if found.conclusion is ReplayConclusion.SEVERAL:
        assert bad <= set(found.machines)
    else:
        assert found.conclusion is ReplayConclusion.ONE, "a single machine explains the result, too"
        assert len(rows) == len(columns) == 1


def test_a_replay_without_a_fault_clears_no_machine() -> None:
    plan = plan_replay(6, 2)
    assert suspects(plan, shown(plan)) == suspects(plan, {group.name: False for group in plan.groups})
    assert suspects(plan, shown(plan)).conclusion is ReplayConclusion.NOTHING
    assert not_reproduced(4, 0.02, 100).startswith("not reproduced on groups of 4 machines in 100 runs")
    assert not_reproduced(4, 0.02, 100).count("is missed with probability 0.13") == 1
    assert ", one that shows in" not in not_reproduced(4, 0.02, 100)
    assert "probability 0.062, one that shows in 0.02 of them with 0.92, and one that" in not_reproduced(4, 0.5, 4)


def test_one_phase_alone_names_no_machine() -> None:
    plan = plan_replay(6, 2)
    only_rows = {name: name == "row 1" for name in shown(plan)}

    assert suspects(plan, only_rows).conclusion is ReplayConclusion.INCONSISTENT
    assert suspects(plan, only_rows).machines == ()


@given(SIZES, st.data())
def test_groups_that_could_not_be_run_change_no_suspect(sizes: tuple[int, int], data: st.DataObject) -> None:
    """Either no machine is named, or the machines that a complete replay names."""
    m, n = sizes
    plan, bad = plan_replay(m * n, m), data.draw(st.integers(0, m * n - 1))
    complete = shown(plan, bad)
    missing = data.draw(st.sets(st.sampled_from(sorted(complete)), min_size=1, max_size=len(complete)))
    found = suspects(plan, {name: None if name in missing else value for name, value in complete.items()})

    assert found.conclusion in {ReplayConclusion.INCOMPLETE, ReplayConclusion.ONE}
    assert found.machines in {(), suspects(plan, complete).machines}


@given(st.floats(0.001, 1.0), st.floats(1e-6, 1.0))
def test_the_needed_runs_are_as_few_as_possible(shows: float, miss: float) -> None:
    runs = runs_needed(shows, miss)

    assert miss_probability(shows, runs) <= miss
    assert runs == 1 or miss_probability(shows, runs - 1) > miss * (1 - 1e-9)


def test_a_fault_that_shows_once_in_fifty_runs_takes_many() -> None:
    assert runs_needed(0.02, 0.05) == 149
    with pytest.raises(ValueError, match="above 0"):
        runs_needed(0.0, 0.05)
