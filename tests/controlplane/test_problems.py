"""How failing copies are reported to a person who follows a job: once at the beginning, and once when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.v1 import agent_pb2 as pb
from controlplane.problems import Copying, ProblemTracker, copying_of, problems_of

FULL = "step {} is not on disk: no space left, {} MB free"


def disk(machine: str, step: int, problem: str = "") -> Copying:
    return Copying("disk", machine, step, problem)


def told(*pictures: tuple[float, Sequence[Copying]]) -> list[str]:
    tracker = ProblemTracker()
    return [event.line for now, seen in pictures for event in tracker.changes(seen, now)]


def test_a_problem_is_told_once_however_its_numbers_change_and_once_when_it_is_over() -> None:
    lines = told(
        (0.0, [disk("m0", 10)]),
        (1.0, [disk("m0", 10, FULL.format(20, 3.5))]),
        *[(step / 10, [disk("m0", 10, FULL.format(step, 2))]) for step in range(30, 90)],
        (10.0, [disk("m0", 90)]),
        (20.0, [disk("m0", 100)]),
    )
    assert lines == [
        "checkpoints: disk on m0: step 30 is not on disk: no space left, 2 MB free",
        "checkpoints: disk on m0: copies succeed again",
    ]


def test_what_passes_by_itself_is_not_told() -> None:
    """A problem that is over within two seconds is not reported."""
    assert told((0.0, [disk("m0", -1, "no backup yet")]), (1.5, [disk("m0", 5)]), (9.0, [disk("m0", 6)])) == []


def test_a_restart_forgets_why_but_the_problem_is_not_over() -> None:
    """A restarted agent reports no problem for a while. The same problem is then not reported again."""
    problem = FULL.format(20, 1)
    lines = told(
        (0.0, [disk("m0", 10, problem)]),
        (3.0, [disk("m0", 10, problem)]),
        (4.0, [disk("m0", -1)]),
        (5.0, [disk("m0", 10)]),
        (6.0, [disk("m0", 10, problem)]),
        (9.0, [disk("m0", 10, problem)]),
    )
    assert len(lines) == 1


def test_many_machines_make_one_line() -> None:
    names = [f"m{index}" for index in range(1000)]
    late = [disk(name, 10, f"/x does not exist on {name}") for name in names]
    lines = told(
        (0.0, late[:1]),
        (3.0, late),
        (4.0, [disk(name, 20) for name in names[:10]] + late[10:]),
        (5.0, [disk(name, 20) for name in names]),
    )
    assert lines == [
        "checkpoints: disk on m0, m1, m2, m3 and 996 more machines: /x does not exist on m0",
        "checkpoints: disk on m0, m1, m2, m3 and 996 more machines: copies succeed again",
    ]


def test_another_cause_on_the_same_machine_is_told_too() -> None:
    lines = told(*[(now, [disk("m0", 1, why)]) for now, why in [(0, "full"), (3, "full"), (4, "gone"), (7, "gone")]])
    assert [line.rpartition(" ")[2] for line in lines] == ["full", "gone"]


def test_what_fails_at_the_end_is_left_even_if_it_was_too_short_to_be_told() -> None:
    """The problem failed for too short a time to be reported before the job ended."""
    tracker = ProblemTracker()
    assert tracker.changes([disk("m0", -1, "full"), disk("m1", -1, "full"), disk("m2", 5)], 0.0) == []
    assert [event.machines for event in tracker.left()] == [("m0", "m1")]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "full", "gone 1", "gone 2"])), max_size=60))
def test_an_end_is_never_told_without_its_beginning(history: list[tuple[int, str]]) -> None:
    tracker, open_ = ProblemTracker(), False
    for now, (step, problem) in enumerate(history):
        for event in tracker.changes([disk("m0", step, problem)], float(now)):
            assert event.kind == "began" or open_
            open_ = event.kind == "began"


def test_disk_and_remote_storage_are_told_apart_in_what_an_agent_says() -> None:
    def rank(number: int, generation: int, **saved: object) -> pb.RankProgress:
        return pb.RankProgress(rank=number, generation=generation, saved=pb.SavedState(**saved))  # type: ignore[arg-type]

    both = "/x is full; remote storage s3://b fails: no; it is tried again in 2 s"
    assert problems_of(rank(0, 1, disk_problem=both)) == {
        "steps": "",
        "backup": "",
        "disk": "/x is full",
        "remote storage": "s3://b fails: no; it is tried again in 2 s",
    }
    seen = copying_of(
        {
            "m0": [rank(0, 2, disk_step=5, backup_step=9), rank(1, 2, disk_step=4, backup_step=8, disk_problem=both)],
            "m1": [rank(2, 1, backup_problem="of an earlier generation")],
        }
    )
    assert seen == [
        Copying("steps", "m0", 0, ""),
        Copying("backup", "m0", 8, ""),
        Copying("disk", "m0", 4, "/x is full"),
        Copying("remote storage", "m0", 0, "s3://b fails: no; it is tried again in 2 s"),
    ]


def test_ranks_that_drift_apart_are_told_with_what_helps() -> None:
    """The report names the setting that helps."""

    def said(steps: int) -> str:
        return problems_of(pb.RankProgress(saved=pb.SavedState(apart=steps)))["steps"]

    assert said(12).startswith("ranks drift up to 12 steps apart")
    assert "slots =" not in said(12), "a file has at most 8 slots, so more slots cannot help"
    assert said(5).endswith("communicate more often, or set slots = 7")
