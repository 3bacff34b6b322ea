"""The conclusions that a watcher draws from the reports of machines."""

from __future__ import annotations

from typing import Any

import pytest

from activities.watching.job_view import Finished, JobView
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.conclusions import unknown
from everstep.decisions.blame.hang.progress import HangCheck, HangSign
from everstep.decisions.keep.align_backups import Aligned
from everstep.decisions.keep.disk_schedule import Agreed
from everstep.decisions.keep.save_pace import PaceOrder
from everstep.decisions.notices import PacedJob
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.save_pace import SavePace

S = 10**9
MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(2)]
CHECKPOINT = CheckpointPolicy(max_unsaved_steps=10, max_unsaved_s=5.0, disk_every_min=1.0)


def watched(**fields: Any) -> JobView:
    spec = JobSpec(
        name="job", script="/job.py", machines=2, checkpoint=CHECKPOINT, policy=RecoveryPolicy(hang={"floor_s": 30.0})
    )
    given: dict[str, Any] = {"spec": spec, "machines": MACHINES}
    return JobView(**(given | fields))


def progress(rank: int, now_ns: int, steps: int, *, generation: int = 1, **saved: Any) -> pb.ProgressReply:
    nothing: dict[str, Any] = {"own_step": -1, "backup_step": -1, "disk_step": -1, "disk_wanted": -1, "remote_step": -1}
    shown = pb.RankProgress(
        rank=rank,
        generation=generation,
        alive=True,
        attached=True,
        completed_steps=steps,
        milestones=pb.Milestones(first_step=1),
        saved=pb.SavedState(**(nothing | saved)),
    )
    return pb.ProgressReply(time_ns=now_ns, generation=generation, ranks=[shown])


def show(job: JobView, now_ns: int, steps: int, *, ranks: tuple[int, ...] = (0, 1), **more: Any) -> None:
    for rank in ranks:
        job.showed(f"m{rank}", progress(rank, now_ns, steps, **more), now_ns)


def anomalies(job: JobView, now_ns: int) -> list[Anomaly]:
    return [verdict for verdict in job.verdicts(now_ns) if isinstance(verdict, Anomaly)]


def test_steps_without_saves_are_reported() -> None:
    job = watched()
    show(job, 100 * S, 20, own_step=20, own_ns=100 * S)
    assert anomalies(job, 100 * S) == []

    show(job, 104 * S, 40, own_step=20, own_ns=100 * S)
    assert anomalies(job, 104 * S) == [], "many steps without a save, but only for a short time"
    show(job, 106 * S, 40, own_step=20, own_ns=100 * S)

    [found] = anomalies(job, 106 * S)
    assert (found.symptom, found.generation, found.machines) == (Symptom.UNSAVED, 1, ["m0", "m1"])
    assert found.rule == "stale-checkpoint"
    job.reported.add(1)
    assert anomalies(job, 200 * S) == []


def test_a_rank_that_has_not_saved_since_the_restart_is_reported_too() -> None:
    job = watched()
    show(job, 100 * S, 20, own_step=20, own_ns=100 * S)
    job.reported.add(1)
    for seconds, steps in ((110, 20), (120, 25), (130, 31)):
        show(job, seconds * S, steps, generation=2)

    [found] = anomalies(job, 130 * S)
    assert found.symptom is Symptom.UNSAVED
    assert "step 20" in found.headline


def test_a_script_that_never_saved_is_not_reported() -> None:
    job = watched()
    show(job, 100 * S, 20)
    show(job, 900 * S, 500)

    assert anomalies(job, 900 * S) == []


def test_if_the_step_on_disk_is_old_all_machines_are_asked_for_a_coming_step() -> None:
    job = watched()
    steps = [job_asked(job, second, 10 * second) for second in range(1, 75)]

    asked = [step for step in steps if step is not None]
    assert len(asked) == 1
    second = steps.index(asked[0]) + 1
    assert second >= 60
    assert asked[0] > 10 * second


def job_asked(job: JobView, second: int, steps: int) -> int | None:
    show(job, second * S, steps, own_step=steps, own_ns=second * S)
    return job.persist(second * S)


def test_the_wanted_step_is_sent_again_to_a_machine_that_missed_it() -> None:
    job = watched()
    for second in range(1, 10):
        job_asked(job, second, 10 * second)
    show(job, 10 * S, 100, ranks=(0,), disk_wanted=128)

    assert job.persist(10 * S) == 128
    show(job, 10 * S, 100, ranks=(1,), disk_wanted=128)
    assert job.persist(10 * S) is None


def test_all_machines_learn_which_step_all_have_on_disk() -> None:
    job = watched()
    assert job.on_disks() == (0, Agreed())
    show(job, 10 * S, 100, ranks=(0,), disk_steps=[64, 80, 96], disk_passed=96)
    assert job.on_disks() == (1, Agreed()), "the steps of rank 1 on disk are unknown"
    show(job, 10 * S, 100, ranks=(1,), disk_steps=[64], disk_passed=90)
    assert job.on_disks() == (1, Agreed(keep=64, gone=(80,)))
    show(job, 11 * S, 100, disk_steps=[64, 96], disk_passed=96, disk_kept=64)
    assert job.on_disks() == (1, Agreed(keep=96, settled=64))
    show(job, 12 * S, 100, generation=2)
    assert job.on_disks() == (2, Agreed())


@pytest.mark.parametrize("ahead_s", [-86_400, 86_400])
def test_the_age_of_a_copy_does_not_depend_on_the_clocks_of_machines(ahead_s: int) -> None:
    """The job's policy is ``CHECKPOINT``, with a copy on disk each minute."""
    job, asked = watched(), []
    for second in range(100_000, 100_100):
        for rank, off in ((0, 0), (1, ahead_s)):
            reply = progress(
                rank, (second + off) * S, second, disk_step=64, disk_steps=[64], disk_age_s=second - 99_970
            )
            job.showed(f"m{rank}", reply, second * S)
        if job.persist(second * S) is not None:
            asked.append(second)
    assert asked[0] == 100_030


def test_machines_are_aligned_in_the_running_generation() -> None:
    def aligned() -> tuple[int, Aligned] | None:
        job = watched()
        for second in range(1, 10):
            show(job, second * S, second, ranks=(0,), generation=3, own_step=second, backup_step=second)
            show(job, second * S, second, ranks=(1,), generation=3, own_step=second, backup_step=0)
            if found := job.align(second * S):
                return found
        return None

    found = aligned()
    assert found is not None
    assert found[0] == 3 and found[1].named > 2


@pytest.mark.parametrize(("newest_slots", "apart"), [(0, 0), (3, 2)])
def test_ranks_drift_apart_by_the_slots_that_they_have_and_not_by_those_that_the_job_wants(
    newest_slots: int, apart: int
) -> None:
    job, found = watched(), 0
    for second in range(1, 9):
        for rank, step in ((0, 20 + second), (1, 17 + second)):
            show(job, second * S, step, ranks=(rank,), own_step=step, newest_slots=newest_slots)
        if aligned := job.align(second * S):
            found = aligned[1].apart
    assert found == apart


def test_nothing_is_requested_of_ended_ranks() -> None:
    job = watched()
    show(job, 100 * S, 20, own_step=20, own_ns=100 * S)
    for rank in (0, 1):
        reply = progress(rank, 300 * S, 80, own_step=20, own_ns=100 * S)
        reply.ranks[0].alive = False
        job.showed(f"m{rank}", reply, 300 * S)

    assert [one.symptom for one in anomalies(job, 300 * S)] == []
    assert job.persist(300 * S) is None


def test_a_silent_machine_is_named_in_a_hang() -> None:
    job = watched()
    for second in range(100):
        show(job, second * S, 20, ranks=(0,), own_step=20, own_ns=second * S)
        found = anomalies(job, second * S)
        if found:
            break

    assert [one.symptom for one in found] == [Symptom.HANG]
    assert found[0].machines == ["m1"]


def test_a_job_whose_agents_never_answered_is_reported_as_hung() -> None:
    job = watched(known=(4, 20))
    found = [one for second in range(0, 100, 2) for one in anomalies(job, second * S)]

    assert found[0].generation == 4
    assert found[0].machines == ["m0", "m1"]


def test_the_end_of_all_ranks_is_a_verdict_until_it_is_reported() -> None:
    job = watched()
    for rank in (0, 1):
        end = pb.RankEnd(rank=rank, exit=pb.Exit(kind=pb.Exit.CODE, value=0, time_ns=5), finished=True)
        job.ended(f"m{rank}", pb.Observation(id=f"m{rank}-1", sequence=1, generation=1, rank_ended=end), 5)

    assert job.woken.is_set()
    assert list(job.verdicts(9)) == [Finished(1)]
    job.reported.add(1)
    assert list(job.verdicts(9)) == []


def test_the_report_of_an_emptied_machine_has_the_time_since_the_last_step() -> None:
    job = watched()
    for second in range(100, 111):  # the job completed its last step at 100 s
        show(job, second * S, 20, own_step=20, own_ns=100 * S)
        assert anomalies(job, second * S) == []
    job.showed("m1", pb.ProgressReply(time_ns=111 * S), 111 * S)

    [found] = anomalies(job, 111 * S)
    assert found.quiet_s == pytest.approx(11)


def test_an_emptied_machine_is_reported_although_no_rank_failed() -> None:
    job = watched()
    empty = pb.ProgressReply(time_ns=90 * S)
    job.showed("m1", empty, 90 * S)  # m1 answered before the launch
    assert anomalies(job, 90 * S) == []
    show(job, 100 * S, 20, own_step=20, own_ns=100 * S)
    job.woken.clear()
    job.showed("m1", empty, 101 * S)

    assert job.woken.is_set()
    [found] = anomalies(job, 101 * S)
    assert (found.symptom, found.generation, found.machines, found.ranks) == (Symptom.CRASH, 1, ["m1"], [1])
    assert found.headline == "m1 came back empty and lost rank 1"
    job.reported.add(1)
    job.showed("m1", empty, 102 * S)
    assert anomalies(job, 102 * S) == []
    show(job, 110 * S, 20, generation=2, own_step=20, own_ns=100 * S)
    assert anomalies(job, 110 * S) == []
    for machine in ("m0", "m1"):
        job.showed(machine, empty, 111 * S)
    [found] = anomalies(job, 111 * S)
    assert (found.generation, found.machines, found.ranks) == (2, ["m0", "m1"], [0, 1])


def test_a_machine_that_is_not_launched_yet_is_not_lost() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.reported.add(1)
    show(job, 110 * S, 20, generation=2, ranks=(0,))
    job.showed(
        "m1", pb.ProgressReply(), 110 * S
    )  # m1 lost its rank of generation 1, and is not yet launched in generation 2
    assert anomalies(job, 110 * S) == []


def test_a_machine_whose_ranks_were_never_seen_is_lost_only_if_the_workflow_says_that_it_ran() -> None:
    job = watched()
    show(job, 100 * S, 20, ranks=(0,))
    empty = pb.ProgressReply(time_ns=101 * S)
    job.showed("m1", empty, 101 * S)
    assert job.has_bare
    assert anomalies(job, 101 * S) == [], "m1 knows no rank, perhaps because it was not launched yet"

    job.note_running(1, 1, 102 * S)
    assert anomalies(job, 102 * S) == [], "m1's last report is older than the workflow's report that m1 ran"
    job.showed("m1", empty, 103 * S)
    [found] = anomalies(job, 103 * S)
    assert (found.symptom, found.generation, found.machines, found.ranks) == (Symptom.CRASH, 1, ["m1"], [1])

    show(job, 104 * S, 21, ranks=(1,))
    assert not job.has_bare
    assert anomalies(job, 104 * S) == []


def test_the_workflows_word_about_one_generation_does_not_count_for_the_next_one() -> None:
    job = watched()
    show(job, 100 * S, 20)
    job.note_running(1, 1, 101 * S)
    job.reported.add(1)
    show(job, 110 * S, 20, generation=2, ranks=(0,))
    job.showed("m1", pb.ProgressReply(), 110 * S)

    assert anomalies(job, 110 * S) == []


def shown(job: JobView, second: int, *ranks: dict[str, Any]) -> None:
    """Let each machine report its rank of generation 2 with the given values."""
    for rank, given in enumerate(ranks):
        fields: dict[str, Any] = {"alive": True, "attached": True, "completed_steps": 20} | given
        marks = pb.Milestones(**({"loop_entered": 1} | fields.pop("marks", {})))
        one = pb.RankProgress(rank=rank, generation=2, milestones=marks, **fields)
        job.showed(f"m{rank}", pb.ProgressReply(time_ns=second * S, generation=2, ranks=[one]), second * S)


def hung(job: JobView, begin: int, end: int, *ranks: dict[str, Any]) -> list[Anomaly]:
    """Return the anomalies from ``begin`` to ``end``, seconds, while the ranks' reports do not change."""
    found: list[Anomaly] = []
    for second in range(begin, end, 2):
        shown(job, second, *ranks)
        found += anomalies(job, second * S)
    return found


def test_a_long_first_step_is_no_hang() -> None:
    """Restored ranks report the step from which they resume, which does not count as a completed step."""
    stepped: dict[str, Any] = {"completed_steps": 21, "marks": {"first_step": 1}}
    job = watched()

    assert hung(job, 0, 500, {}, {}) == []
    assert hung(job, 500, 1000, stepped, {}) == [], "rank 1 is still in its first step"
    assert hung(job, 1000, 1026, stepped, stepped) == []
    assert [one.symptom for one in hung(job, 1026, 1040, stepped, stepped)][:1] == [Symptom.HANG]


def test_ranks_that_never_step_are_left_out_of_the_detection_of_hangs() -> None:
    server: dict[str, Any] = {"attached": False, "completed_steps": -1, "marks": {"loop_entered": 0}}
    job = watched()

    for second in range(10):
        count = {"attached": False, "completed_steps": -1, "optimizer_steps": second, "marks": {"loop_entered": 0}}
        shown(job, second, count, server)
        assert anomalies(job, second * S) == []
    assert [one.symptom for one in hung(job, 10, 60, count, server)][:1] == [Symptom.HANG]


def test_ranks_that_left_their_loops_are_no_hang() -> None:
    job = watched()
    for done in ({"finished": True}, {"marks": {"first_step": 1, "loop_left": 9}}):
        assert hung(job, 0, 500, done, done) == []


def left(job: JobView, rank: int, second: int) -> None:
    end = pb.RankEnd(rank=rank, exit=pb.Exit(kind=pb.Exit.CODE, value=0, time_ns=5))
    job.ended(f"m{rank}", pb.Observation(id=f"m{rank}-1", sequence=1, generation=2, rank_ended=end), second * S)


def test_a_rank_that_left_alone_is_reported_and_one_that_left_first_is_not() -> None:
    """A rank has left alone if the other ranks are still in their loops.

    It has only left first if the others left their loops too.
    """
    gone = {"alive": False, "marks": {"first_step": 1}}
    for marks, symptoms in (({"first_step": 1}, [Symptom.EARLY_EXIT]), ({"first_step": 1, "loop_left": 1}, [])):
        job = watched(spec=watched().spec.model_copy(update={"policy": RecoveryPolicy(stop={"exit_grace_s": 60})}))
        left(job, 1, 100)
        shown(job, 100, {"marks": marks}, gone)
        assert anomalies(job, 159 * S) == []
        assert [one.symptom for one in anomalies(job, 161 * S)] == symptoms
        left(job, 0, 200)
        if not symptoms:
            assert list(job.verdicts(200 * S)) == [Finished(2)]


def test_a_machine_that_is_lost_while_the_job_ends_is_detected() -> None:
    """No rank has a step left. So the loss is noticed because the end of the silent machine's rank is missing."""
    job = watched(spec=watched().spec.model_copy(update={"policy": RecoveryPolicy(stop={"exit_grace_s": 60})}))
    over = {"finished": True, "marks": {"first_step": 1, "loop_left": 9}}
    shown(job, 100, over, over)
    left(job, 0, 101)

    def found(second: int) -> list[Symptom]:
        shown(job, second, over | {"alive": False})
        return [one.symptom for one in anomalies(job, second * S)]

    assert [found(second) for second in range(102, 160)] == [[]] * 58
    assert found(162) == [Symptom.MACHINE_SILENT]


def test_data_of_reported_generations_are_forgotten() -> None:
    """A job has many generations with thousands of ranks each. Without this, the view would grow for months."""
    job = watched()
    for generation in range(1, 30):
        show(job, generation * S, 20, generation=generation, own_step=20, own_ns=S)
        for rank in (0, 1):
            end = pb.RankEnd(rank=rank, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=5))
            told = pb.Observation(id=f"m{rank}-1", sequence=generation, generation=generation, rank_ended=end)
            job.ended(f"m{rank}", told, generation * S)
        job.persist(generation * S)
        job.align(generation * S)
        assert [found.generation for found in anomalies(job, generation * S)] == [generation]
        job.reported.add(generation)

    copies = job._copies
    for kept in (job._exits, job._steps, copies._persist, copies._align, copies._drift):
        assert len(kept) <= 2
    assert len(job._first) <= 4


@pytest.mark.parametrize(("sign", "learnt"), [(HangSign.OUTSIDE, True), (HangSign.QUIET, False), (None, False)])
def test_a_pause_that_a_restart_ended_is_learnt_if_the_job_waited_outside(
    sign: HangSign | None, *, learnt: bool
) -> None:
    """If the pause were not learnt, it would be taken for a hang each time."""
    job = watched()
    for second in range(20):
        show(job, second * S, second + 1)
        job.facts(1, second * S)
    for second in range(20, 60):
        show(job, second * S, 20)
        job.facts(1, second * S)
    if sign is not None:
        job.sampled(job.steps_seen, HangCheck(sign, unknown("a server does not answer")))
    [hang] = [found for found in anomalies(job, 60 * S) if found.symptom is Symptom.HANG]
    job.accepted(hang, 60 * S)
    show(job, 61 * S, 20, generation=2)
    assert (job.facts(2, 61 * S).longest_step_s > 30) == learnt


def show_saves(job: JobView, *saves: pb.PacedSaves) -> None:
    for rank, one in enumerate(saves):
        reply = progress(rank, 100 * S, 40, own_step=40, own_ns=100 * S)
        reply.ranks[0].saves.CopyFrom(one)
        job.showed(f"m{rank}", reply, 100 * S)


def saves(pace: SavePace, wanted: int, asked: SavePace | None = None) -> pb.PacedSaves:
    asked_of = pb.SavePace(**(asked or pace)._asdict())
    return pb.PacedSaves(pace=pb.SavePace(**pace._asdict()), asked=asked_of, wanted=wanted, save_s=wanted, step_s=1.0)


def test_all_ranks_move_to_the_distance_that_the_slowest_needs() -> None:
    job = watched(spec=JobSpec(name="job", script="/job.py", machines=2))
    show_saves(job, saves(SavePace(), 1), saves(SavePace(), 4))
    first = SavePace(1, 1, True)
    assert job.pace_saves() == (1, PaceOrder(SavePace(), first))
    show_saves(job, saves(SavePace(), 1, first), saves(SavePace(), 4))
    assert job.pace_saves() == (1, PaceOrder(first, first))
    assert job.paced() is not None
    show_saves(job, saves(first, 1), saves(SavePace(), 4, first))
    assert job.paced() is None, "the ranks have different paces now"
    show_saves(job, saves(SavePace(5, 4), 1), saves(SavePace(5, 4), 4))
    assert job.pace_saves() is None
    assert job.paced() == PacedJob("job", 1, SavePace(5, 4), save_s=4.0, step_s=1.0)


@pytest.mark.parametrize("checkpoint", [{"save_every_steps": 3}, {"slots": 2}, {"max_unsaved_steps": 2}])
def test_a_fixed_or_limited_distance_is_kept(checkpoint: dict[str, Any]) -> None:
    policy = CheckpointPolicy.model_validate(checkpoint)
    job = watched(spec=JobSpec(name="job", script="/job.py", machines=2, checkpoint=policy))
    pace = SavePace(every=policy.first_distance(0))
    show_saves(job, saves(pace, 8), saves(pace, 8))
    assert job.pace_saves() is None


def test_a_step_that_is_asked_for_on_disk_is_one_that_ranks_save() -> None:
    job = watched()
    for second in range(1, 75):
        pace = saves(SavePace(3, 10), 8)
        for rank in (0, 1):
            reply = progress(rank, second * S, 10 * second, own_step=10 * second, own_ns=second * S)
            reply.ranks[0].saves.CopyFrom(pace)
            job.showed(f"m{rank}", reply, second * S)
        if step := job.persist(second * S):
            assert step % 10 == 0
            return
    raise AssertionError("no step was asked for")
