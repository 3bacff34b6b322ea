"""A job starts from the requested step, or reports why it cannot."""

from __future__ import annotations

from typing import Any

from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.read_folder import FolderFound
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.ledger.records import NumbersUsed
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit
from everstep.model.state_copy import Restored, StateCopies, Tier
from tests.workflows.conftest import MACHINES, anomaly
from workflows.job import JobWorkflow

FOLDER = "/disk/other/step-000000120"


def on_disks(*steps: int, tier: Tier = Tier.DISK, ranks: tuple[int, ...] = (0, 1)) -> list[StateCopies]:
    return [
        StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=step, tier=tier, generation=3)
        for rank in ranks
        for step in steps
    ]


def found(*held: StateCopies, **more: Any) -> Any:
    def answer(given: FindCheckpoints) -> Evidence:
        return Evidence(generation=0, held=list(held), **more)

    return answer


async def test_a_job_continues_from_the_requested_step(jobs: Any) -> None:
    jobs.cluster.found = found(*on_disks(100, 120, 140))
    jobs.cluster.used = NumbersUsed(generations=3)
    handle = await jobs.start({"resume_from": 120})

    state = await jobs.until(handle, lambda state: state.status == "running")

    assert jobs.cluster.calls == [
        "find 120",
        "prepare",
        "restore 0 from disk on m0, 1 from disk on m1",
        "launch 4 from 120",
        "confirm 4",
    ]
    assert (state.resume_step, state.lineage) == (120, [(4, 120)])


async def test_a_job_names_its_run_in_every_command_and_uses_copies_of_its_origin(jobs: Any) -> None:
    """The first generation fails at once. The job then restores its step from copies of both runs."""
    earlier = [one.model_copy(update={"run": "20261121-1"}) for one in on_disks(100, 120)]
    memory = [StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=120, run="20261121-1") for rank in (0, 1)]
    jobs.cluster.found = found(*earlier, *memory)
    handle = await jobs.start({"resume_from": 120})
    state = await jobs.until(handle, lambda state: state.status == "running")
    assert "restore 0 from disk on m0, 1 from disk on m1" in jobs.cluster.calls, (
        "copies in memory are of another run, so only disks are used"
    )
    assert state.origin_runs == ["20261121-1"]
    assert state.run > "20261121-1"

    own = [StateCopies.one(rank=0, machine="m0", completed_steps=120, run=state.run)]
    strange = [one.model_copy(update={"run": "20261120-0", "completed_steps": 130}) for one in earlier]
    jobs.cluster.evidence = lambda given: Evidence(
        generation=given.generation,
        exits=[RankExit(rank=1, machine="m1", signal=9, time_ns=1, completed_steps=121)],
        held=[*own, *earlier, *strange, *memory],
    )
    await handle.execute_update(JobWorkflow.report, anomaly(1))
    await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")
    assert jobs.cluster.calls[-3:] == ["restore 1 from disk on m1", "launch 2 from 120", "confirm 2"]

    await handle.signal("stop", {"operator": "you"})
    await handle.result()
    assert jobs.cluster.runs == {state.run}


async def test_a_step_that_was_saved_with_other_sizes_is_refused(jobs: Any) -> None:
    other = [one.model_copy(update={"topology": "1,2,1,1,pp-dp-tp"}) for one in on_disks(120)]
    jobs.cluster.found = found(*other)
    handle = await jobs.start({"resume_from": 120})

    result = await handle.result()

    assert "step 120 was saved with the sizes 1,2,1,1,pp-dp-tp, and the job has 2,1,1,1,pp-dp-tp" in result.headline
    assert jobs.cluster.calls == ["find 120", "release"]


async def test_later_steps_of_an_earlier_run_are_never_restored(jobs: Any) -> None:
    """The first generation fails at once. Steps on disk beyond the requested step are of the earlier run only."""
    jobs.cluster.found = found(*on_disks(100, 120, 140))
    jobs.cluster.used = NumbersUsed(generations=3)
    jobs.cluster.evidence = lambda given: Evidence(
        generation=given.generation,
        exits=[RankExit(rank=1, machine="m1", signal=9, time_ns=1, completed_steps=121)],
        held=on_disks(100, 120, 140),
    )
    handle = await jobs.running({"resume_from": 120})
    await handle.execute_update(JobWorkflow.report, anomaly(4))

    await jobs.until(handle, lambda state: state.generation == 5 and state.status == "running")

    assert "launch 5 from 120" in jobs.cluster.calls


async def test_a_missing_step_ends_the_job_with_a_list_of_existing_steps(jobs: Any) -> None:
    jobs.cluster.found = found(*on_disks(100, 140), *on_disks(120, ranks=(0,)), unreachable=["m1"])
    handle = await jobs.start({"resume_from": 120})

    result = await handle.result()

    assert result.outcome == "failed"
    assert "was not started: step 120 cannot be restored by all 2 ranks: rank 1 lacks it" in result.headline
    assert "there are steps 140, 100" in result.headline
    assert "m1 does not answer" in result.headline
    assert jobs.cluster.calls == ["find 120", "release"]


async def test_another_copy_of_the_step_is_used_if_one_is_damaged(jobs: Any) -> None:
    def damaged(given: RestoreCheckpoints) -> Restored:
        bad = [one for one in given.copies if one.ranks.first == 1 and one.tier is Tier.DISK]
        failed = [one.changed(valid=False, reason="cut off") for one in bad]
        return Restored(moved=[one for one in given.copies if one not in bad], failed=failed)

    jobs.cluster.found = found(*on_disks(120), *on_disks(120, tier=Tier.REMOTE))
    jobs.cluster.restored = damaged
    handle = await jobs.start({"resume_from": 120})

    await jobs.until(handle, lambda state: state.status == "running")

    assert jobs.cluster.calls[2:4] == [
        "restore 0 from disk on m0, 1 from disk on m1",
        "restore 0 from disk on m0, 1 from remote on m1",
    ]


async def test_a_job_whose_only_copy_is_damaged_is_not_started_from_another_step(jobs: Any) -> None:
    def damaged(given: RestoreCheckpoints) -> Restored:
        return Restored(failed=[one.changed(valid=False, reason="cut off") for one in given.copies])

    jobs.cluster.found = found(*on_disks(100, 120))
    jobs.cluster.restored = damaged
    handle = await jobs.start({"resume_from": 120})

    result = await handle.result()

    assert result.outcome == "failed"
    assert "there are steps 100" in result.headline
    assert "cut off" in result.headline
    assert not [call for call in jobs.cluster.calls if call.startswith("launch")]


async def test_a_job_starts_from_a_folder_that_was_saved_with_other_sizes(jobs: Any) -> None:
    jobs.cluster.folder = FolderFound(step=120, ranks=4)
    handle = await jobs.start({"resume_path": FOLDER})

    state = await jobs.until(handle, lambda state: state.status == "running")

    assert jobs.cluster.calls == [f"folder {FOLDER}", "prepare", f"launch 1 from 120 of {FOLDER}", "confirm 1"]
    assert (state.resume_step, state.lineage) == (120, [(1, -1)])


async def test_a_job_that_fails_before_its_first_save_starts_from_the_folder_again(jobs: Any) -> None:
    jobs.cluster.folder = FolderFound(step=120, ranks=4)
    jobs.cluster.evidence = lambda given: Evidence(
        generation=given.generation,
        exits=[RankExit(rank=1, machine="m1", signal=9, time_ns=1, completed_steps=120)],
    )
    handle = await jobs.running({"resume_path": FOLDER})
    await handle.execute_update(JobWorkflow.report, anomaly(1))

    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")

    assert f"launch 2 from 120 of {FOLDER}" in jobs.cluster.calls
    assert state.lineage == [(1, -1), (2, -1)]


async def test_an_unusable_folder_ends_the_job_with_the_reason(jobs: Any) -> None:
    jobs.cluster.folder = FolderFound(problem=f"m1 sees 0 of the 4 ranks in {FOLDER}")
    handle = await jobs.start({"resume_path": FOLDER})

    result = await handle.result()

    assert (result.outcome, jobs.cluster.calls) == ("failed", [f"folder {FOLDER}", "release"])
    assert "m1 sees 0 of the 4 ranks" in result.headline


async def test_a_job_without_room_for_its_checkpoints_is_not_started(jobs: Any) -> None:
    jobs.cluster.lacking = "no room for checkpoints on machine m1: 2 ranks need 10.16 GB"
    handle = await jobs.start(checkpoint=CheckpointPolicy(state_mb_per_rank=1000))

    result = await handle.result()

    assert (result.outcome, jobs.cluster.calls) == ("failed", ["room", "release"])
    assert "10.16 GB" in result.headline


async def test_the_jobs_page_describes_the_placement_of_backups(jobs: Any) -> None:
    handle = await jobs.start()

    state = await jobs.until(handle, lambda state: state.status == "running")
    page = await jobs.page(handle)

    assert state.backups == "every backup is outside its rank's groups"
    assert "Backups: every backup is outside its rank's groups." in page


async def test_a_job_leases_its_machines_at_first_and_returns_them_at_last(jobs: Any) -> None:
    handle = await jobs.start()
    state = await jobs.until(handle, lambda state: state.status == "running")
    (lease,) = jobs.cluster.leases
    assert (lease.job, lease.run, lease.machines) == (state.spec.name, state.run, MACHINES)
    assert not jobs.cluster.given_back

    await handle.signal("stop", {"operator": "me"})
    await handle.result()

    (back,) = jobs.cluster.given_back
    assert (back.job, back.run) == (state.spec.name, state.run)
    assert jobs.cluster.calls[-1] == "release"


async def test_a_job_whose_machines_belong_to_another_job_does_not_touch_them(jobs: Any) -> None:
    jobs.cluster.refused = {f"m{number}": "job gpt has it" for number in range(6)}
    handle = await jobs.start()

    result = await handle.result()

    assert result.outcome == "failed"
    assert "m0: job gpt has it; m1: job gpt has it" in result.headline
    assert result.headline.endswith("and 2 more")
    assert jobs.cluster.calls == ["release"]
