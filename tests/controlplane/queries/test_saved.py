"""The lines that tell a person how new the copies of a job's state are."""

from __future__ import annotations

from agent.v1 import agent_pb2 as pb
from controlplane.queries.saved import saved_lines, saved_report, saved_short, unsteady


def rank(number: int, generation: int = 2, **saved: object) -> pb.RankProgress:
    none = {"own_step": -1, "backup_step": -1, "disk_step": -1, "disk_wanted": -1, "remote_step": -1}
    return pb.RankProgress(rank=number, generation=generation, saved=pb.SavedState(**none | saved))  # type: ignore[arg-type]


def test_the_newest_step_that_every_rank_has_is_shown_with_the_slowest_backup() -> None:
    report = saved_report(
        {
            "m0": [rank(0, own_step=120, backup_step=120, disk_step=100, disk_steps=[100], disk_age_s=60.0)],
            "m1": [rank(1, own_step=121, backup_step=118, disk_step=105, disk_steps=[90, 100, 105], disk_wanted=128)],
        },
    )

    assert report is not None
    assert (report.own_step, report.backup_step, report.backup_lag) == (120, 118, 3)
    assert (report.disk_step, report.disk_age_s, report.disk_wanted, report.remote_step) == (100, 60.0, 128, None)
    assert saved_short(report) == "120/118/100"
    assert saved_lines(report) == [
        (
            "saved",
            "step 120 in own memory; 118 at the peers (3 behind); 100 on disk, 1 min 0 s old (next: step 128)",
        )
    ]


def test_different_steps_on_two_disks_are_no_common_step() -> None:
    report = saved_report(
        {
            "m0": [rank(0, own_step=120, disk_step=100, disk_steps=[80, 100])],
            "m1": [rank(1, own_step=121, disk_step=120, disk_steps=[90, 120])],
        }
    )

    assert report is not None
    assert (report.disk_step, report.disk_age_s) == (None, None)


def test_if_a_rank_has_no_copy_there_is_no_common_step() -> None:
    report = saved_report({"m0": [rank(0, own_step=7, backup_step=7), rank(1, own_step=7)]})

    assert report is not None
    assert (report.own_step, report.backup_step, report.disk_step) == (7, None, None)
    assert saved_short(report) == "7/-/-"


def test_problems_are_shown_once_for_each_machine_with_their_ranks() -> None:
    report = saved_report(
        {
            "m1": [
                rank(3, own_step=9, backup_problem="m0 does not answer", disk_problem="disk is full"),
                rank(2, own_step=9, backup_problem="m0 does not answer"),
            ]
        }
    )

    assert report is not None
    assert report.problems == [
        "backup of rank 2, 3 on m1: m0 does not answer",
        "disk of rank 3 on m1: disk is full",
    ]
    assert saved_lines(report)[1:] == [("problem", line) for line in report.problems]


def test_many_problems_are_counted() -> None:
    report = saved_report({f"m{n}": [rank(n, own_step=1, disk_problem="full")] for n in range(12)})

    assert report is not None
    assert len(report.problems) == 12
    assert saved_lines(report)[-1] == ("problem", "… and 4 more")


def test_older_generations_do_not_count() -> None:
    report = saved_report({"m0": [rank(0, generation=1, own_step=5), rank(0, own_step=9, backup_step=9)]})

    assert report is not None
    assert (report.own_step, report.backup_lag) == (9, 0)


def test_without_copies_nothing_is_shown() -> None:
    assert saved_report({}) is None
    assert saved_report({"m0": [rank(0)]}) is None
    assert saved_short(None) == "-"


def drifting(apart: int = 0) -> dict[str, list[pb.RankProgress]]:
    return {
        "m0": [rank(0, own_step=25, own_steps=[22, 23, 24, 25], backup_step=25, apart=apart)],
        "m1": [rank(1, own_step=13, own_steps=[10, 11, 12, 13], backup_step=13, apart=apart)],
    }


def test_only_a_step_that_all_ranks_hold_at_once_counts() -> None:
    again = drifting(apart=12)
    again["m1"] = [rank(1, own_step=14, own_steps=[11, 12, 13, 14], backup_step=14, apart=12)]
    assert unsteady(drifting())
    report = saved_report(again, before=drifting())

    assert report is not None
    assert (report.own_step, report.own_newest, report.apart) == (None, 14, 12)
    assert saved_short(report) == "-/14/-"
    (_, said), (_, problem) = saved_lines(report)[:2]
    assert said.startswith("no common step of all ranks (the slowest rank is at 14) in own memory; ")
    assert problem.startswith("ranks drift up to 12 steps apart")

    aligned = drifting()
    for found in aligned.values():
        found[0].saved.own_steps.append(8)
    assert not unsteady(aligned)
    kept = saved_report(aligned)
    assert kept is not None and (kept.own_step, kept.own_newest) == (8, 13)


def test_agents_that_answer_at_different_times_are_no_drift() -> None:
    """m1 was asked a little earlier than m0. At the second look, m1 has reached the steps that m0 had."""
    again = {
        "m0": [rank(0, own_step=29, own_steps=[26, 27, 28, 29])],
        "m1": [rank(1, own_step=28, own_steps=[25, 26, 27, 28])],
    }
    report = saved_report(again, before=drifting())

    assert report is not None and report.own_step == 28


def saving(
    number: int, *, every: int = 4, waits: bool = False, save_s: float = 1.9, step_s: float = 0.6
) -> pb.RankProgress:
    shown = rank(number, own_step=8)
    pace = pb.SavePace(number=3, every=every, waits=waits)
    shown.saves.CopyFrom(pb.PacedSaves(asked=pace, pace=pace, wanted=4, save_s=save_s, step_s=step_s))
    return shown


def test_it_is_shown_after_how_many_steps_ranks_save_and_why() -> None:
    report = saved_report({"m0": [saving(0)], "m1": [saving(1, save_s=0.02, step_s=0.5)]})
    assert report is not None
    assert ("saves", "every 4 steps (a save takes 1.9 s, a step 0.6 s)") in saved_lines(report)
    report = saved_report({"m0": [saving(0, every=1, waits=True, save_s=0.021)]})
    assert report is not None
    (text,) = (line for what, line in saved_lines(report) if what == "saves")
    assert text.startswith("every step (a save takes 21 ms, a step 0.6 s), and training waits for them")


def test_before_a_save_is_measured_its_time_is_not_shown() -> None:
    report = saved_report({"m0": [saving(0, save_s=0.0)]})
    assert report is not None
    assert report.saves is None
