"""Copies are restored on machines that lost them. The server is real, and each task runs a workflow from its start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.job_state import incident_workflow_id
from everstep.model.state_copy import Restored, StateCopies, Tier
from everstep.model.version import VersionStatus
from tests.rank_ends import exited
from tests.workflows.conftest import anomaly
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

VICTIM = exited(
    rank=0,
    machine="m0",
    code=1,
    time_ns=5,
    completed_steps=21,
    exception="RuntimeError: Connection closed by peer [127.0.0.12]:4213",
)


def copy(rank: int, step: int, tier: Tier, machine: str, **more: Any) -> StateCopies:
    return StateCopies.one(
        rank=rank, machine=machine, completed_steps=step, tier=tier, generation=1, bytes=6_150_000, **more
    )


COPIES = [
    copy(0, 20, Tier.OWN, "m0"),
    copy(1, 20, Tier.BACKUP, "m0"),
    copy(0, 15, Tier.DISK, "m0"),
    copy(1, 15, Tier.DISK, "m1"),
]


def m1_empty(given: StopRanks) -> Evidence:
    """Answer that m1 came back empty. Rank 1's state is in its backup on m0, and an older state is on disk."""
    emptied = ["m1"] if given.generation == 1 else []
    return Evidence(generation=given.generation, exits=[VICTIM], held=COPIES, emptied=emptied)


async def lose_m1(jobs: Any, **policy: object) -> tuple[Any, Any]:
    """Start a job whose m1 is lost. Returns the handles of the job and of the incident."""
    jobs.cluster.evidence = m1_empty
    handle = await jobs.running(**policy)
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.incidents != [])
    incident = incident_workflow_id(state.spec.name, 1)
    return handle, jobs.client.get_workflow_handle_for(IncidentWorkflow.run, incident)


def after_stop(jobs: Any) -> list[str]:
    return list(jobs.cluster.calls[jobs.cluster.calls.index("stop 1") :])


async def test_copies_of_a_lost_machine_are_restored_from_backups(jobs: Any) -> None:
    _, incident = await lose_m1(jobs)

    report: IncidentReport = await incident.result()

    assert after_stop(jobs) == ["stop 1", "restore 1 from backup on m0", "launch 2 from 20", "confirm 2"]
    assert [stage.name for stage in report.timings] == ["stop", "decide", "restore", "reattempt", "confirm"]
    moved = report.timings[2].found
    assert moved == "moved 1 copy, 6.2 MB in 0.08 s: rank 1 from backups on m0"
    assert "m1 came back empty and lost rank 1" in report.headline
    assert (report.cause, report.step, report.lost_steps, report.resume_step) == ("machine lost", 21, 1, 20)
    assert report.lineage == [(2, 20)]


async def test_a_damaged_copy_is_replaced_by_another_copy(jobs: Any) -> None:
    def damaged(given: RestoreCheckpoints) -> Restored:
        bad = [one for one in given.copies if one.tier is Tier.BACKUP]
        failed = [one.changed(valid=False, reason="the checksum does not hold") for one in bad]
        return Restored(moved=[one for one in given.copies if one not in bad], failed=failed)

    jobs.cluster.restored = damaged
    _, incident = await lose_m1(jobs, retry={"max_attempts": 1})

    report = await incident.result()

    assert after_stop(jobs)[1:] == [
        "restore 1 from backup on m0",
        "restore 0 from disk on m0, 1 from disk on m1",
        "launch 2 from 15",
        "confirm 2",
    ]
    assert report.lost_steps == 6
    second = [note.text for note in jobs.cluster.notes if note.stage == "decide"][1]
    assert "rank 1 on m0 (backup): the checksum does not hold" in second
    assert "from step 15" in second
    assert report.recovered, "a copy that failed does not count as an attempt"


async def test_a_job_does_not_start_over_while_good_copies_are_out_of_reach(jobs: Any) -> None:
    reached = False

    def no_room(given: RestoreCheckpoints) -> Restored:
        stuck = [one.changed(valid=False, reason="no room on m1") for one in given.copies]
        return Restored(moved=given.copies) if reached else Restored(unreached=stuck)

    jobs.cluster.restored = no_room
    handle, incident = await lose_m1(jobs)
    await jobs.until(handle, lambda state: state.status == "parked")
    [parked] = [note.text for note in jobs.cluster.notes if note.text.startswith("park")]
    assert "out of reach" in parked
    assert "no room on m1" in parked
    assert not [call for call in jobs.cluster.calls if call.startswith("launch 2")]

    reached = True
    await incident.signal("resume", {"operator": "ada", "note": "made room"})
    report = await incident.result()
    assert report.resume_step == 20
    assert "m1 came back empty" in report.headline


async def test_a_machine_that_is_lost_during_the_restore_is_stopped_again(jobs: Any) -> None:
    rounds = 0

    def silent_once(given: RestoreCheckpoints) -> Restored:
        nonlocal rounds
        rounds += 1
        return Restored(unreachable=["m1"]) if rounds == 1 else Restored(moved=given.copies)

    jobs.cluster.restored = silent_once
    _, incident = await lose_m1(jobs)

    report = await incident.result()

    names = [call.split(" from")[0] for call in after_stop(jobs)]
    assert names == ["stop 1", "restore 1", "stop 1", "restore 1", "launch 2", "confirm 2"]
    assert "m1 does not answer" in report.timings[2].found


async def test_a_restore_that_fails_repeatedly_parks_a_job_with_a_pending_version(jobs: Any) -> None:
    away = True

    def not_there(given: RestoreCheckpoints) -> Restored:
        return Restored(unreachable=["m1"]) if away else Restored(moved=given.copies)

    jobs.cluster.restored, jobs.cluster.evidence = not_there, m1_empty
    handle = await jobs.running(retry={"max_attempts": 3, "backoff_initial_s": 0.1})
    await handle.execute_update(JobWorkflow.update, {"code": "/home/ada/gpt", "operator": "ada", "reason": "faster"})
    await jobs.until(handle, lambda state: state.versions[-1].status is VersionStatus.PENDING)
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.status == "parked")
    assert [call for call in after_stop(jobs) if call.startswith("restore")] == ["restore 1 from backup on m0"] * 3
    assert "3 restores failed, one after the other" in jobs.cluster.notes[-1].text

    away = False
    incident = jobs.client.get_workflow_handle_for(IncidentWorkflow.run, incident_workflow_id(state.spec.name, 1))
    await incident.signal("resume", {"operator": "ada"})
    report = await incident.result()
    assert (report.resume_step, report.version) == (20, 2)


@pytest.mark.history("incident-restored")
async def test_remote_storage_is_searched_if_no_other_copy_is_left(jobs: Any) -> None:
    def nothing(given: StopRanks) -> Evidence:
        return Evidence(generation=given.generation, exits=[VICTIM], emptied=["m1"])

    def remote(given: FindCheckpoints) -> Evidence:
        copies = [copy(rank, 18, Tier.REMOTE, "m0", digest="d") for rank in (0, 1)]
        return Evidence(generation=0, held=[*copies, copy(0, 90, Tier.REMOTE, "m0"), copy(1, 90, Tier.REMOTE, "m0")])

    jobs.cluster.evidence = nothing
    handle = await jobs.running(checkpoint=CheckpointPolicy(remote_url="file:///mnt/runs"))
    # The copies of step 90 are of another run of the name, with a generation that this run never had.
    jobs.cluster.found = lambda given: remote(given).model_copy(
        update={
            "held": [
                one.model_copy(update={"generation": 7}) if one.completed_steps == 90 else one
                for one in remote(given).held
            ]
        }
    )
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")

    assert [call for call in after_stop(jobs) if not call.startswith("confirm")] == [
        "stop 1",
        "find",
        "restore 0 from remote on m0, 1 from remote on m0",
        "launch 2 from 18",
    ]
    assert state.lineage == [(1, -1), (2, 18)]


async def test_a_worker_that_dies_during_a_restore_is_replaced_by_another(jobs: Any) -> None:
    """The activity runs twice. Agents answer the second run as they answered the first."""
    brought: set[int] = set()
    attempts = 0

    async def dies_once(given: RestoreCheckpoints) -> Restored:
        nonlocal attempts
        attempts += 1
        new = {one.ranks.first for one in given.copies} - brought
        brought.update(new)
        if attempts == 1:
            raise RuntimeError("the worker is gone")
        return Restored(moved=given.copies, bytes=6_150_000 * len(new))

    jobs.cluster.restored = dies_once
    _, incident = await lose_m1(jobs)

    report = await incident.result()

    assert attempts == 2
    assert report.recovered
    assert [stage.name for stage in report.timings].count("restore") == 1
    assert "0.0 MB" in report.timings[2].found, "the second attempt copied nothing again"


async def test_an_operator_can_abandon_an_incident_during_a_restore(jobs: Any) -> None:
    begun = asyncio.Event()

    async def for_ever(given: RestoreCheckpoints) -> Restored:
        begun.set()
        await asyncio.sleep(600)
        raise AssertionError

    jobs.cluster.restored = for_ever
    handle, incident = await lose_m1(jobs)
    await begun.wait()
    await incident.signal("abandon", {"operator": "ada"})

    assert (await handle.result()).outcome == "failed"
    assert jobs.cluster.calls[-2:] == ["stop 1", "release"]


async def test_a_stop_of_saves_is_recovered_like_other_incidents(jobs: Any) -> None:
    def all_alive(given: StopRanks) -> Evidence:
        exits = [
            RankExit(rank=rank, machine=f"m{rank}", signal=9, stopped_by_us=True, completed_steps=170)
            for rank in (0, 1)
        ]
        own = [copy(rank, 60, Tier.OWN, f"m{rank}") for rank in (0, 1)]
        return Evidence(generation=given.generation, exits=exits, held=own)

    jobs.cluster.evidence = all_alive
    handle = await jobs.running()
    stale = anomaly(symptom=Symptom.UNSAVED).model_copy(update={"headline": "the newest save is 110 steps old"})
    await handle.execute_update(JobWorkflow.report, stale)

    state = await jobs.until(handle, lambda state: state.generation == 2 and state.status == "running")

    assert state.incidents[0].lost_steps == 110
    assert "the newest save is 110 steps old" in state.incidents[0].headline


async def test_a_restart_that_loses_too_many_steps_parks_the_job(jobs: Any) -> None:
    def only_disk(given: StopRanks) -> Evidence:
        disk = [one for one in COPIES if one.tier is Tier.DISK]
        return Evidence(generation=given.generation, exits=[VICTIM], held=disk, emptied=["m1"])

    jobs.cluster.evidence = only_disk
    handle = await jobs.running(retry={"max_lost_steps": 5})
    await handle.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(handle, lambda state: state.status == "parked")

    assert "a restart from step 15 would lose 6 steps" in jobs.cluster.notes[-1].text


def by_headers(given: StopRanks) -> Evidence:
    """Answer with copies in slots that are too large to be read at a stop."""
    copies = [
        copy(rank, step, Tier.OWN, f"m{rank}", saved_ns=step, verified=False) for rank in (0, 1) for step in (19, 20)
    ]
    return Evidence(generation=given.generation, exits=[VICTIM], held=copies)


async def broken(jobs: Any) -> Any:
    """Return the incident of a job whose slots are large."""
    jobs.cluster.evidence = by_headers
    handle = await jobs.running()
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until(handle, lambda state: state.incidents != [])
    return jobs.client.get_workflow_handle_for(IncidentWorkflow.run, incident_workflow_id(state.spec.name, 1))


async def test_large_slots_are_verified_only_when_they_are_chosen(jobs: Any) -> None:
    jobs.cluster.restored = lambda given: Restored(verified=given.copies, seconds=15.0)

    report = await (await broken(jobs)).result()

    assert after_stop(jobs) == [
        "stop 1",
        "restore 0 from own memory on m0, 1 from own memory on m1",
        "launch 2 from 20",
        "confirm 2",
    ]
    assert report.timings[2].found == "2 own slots verified in 15.00 s"


async def test_a_damaged_large_slot_leads_to_another_choice_before_ranks_start(jobs: Any) -> None:
    def damaged(given: RestoreCheckpoints) -> Restored:
        bad = [one for one in given.copies if (one.ranks.first, one.completed_steps) == (1, 20)]
        failed = [one.changed(valid=False, reason="its contents do not match") for one in bad]
        return Restored(verified=[one for one in given.copies if one not in bad], failed=failed)

    jobs.cluster.restored = damaged
    report = await (await broken(jobs)).result()

    both = "restore 0 from own memory on m0, 1 from own memory on m1"
    assert after_stop(jobs) == ["stop 1", both, both, "launch 2 from 19", "confirm 2"]
    notes = [note.text for note in jobs.cluster.notes if note.stage == "decide"]
    assert "rank 1 on m1: its contents do not match" in notes[-1]
    assert report.recovered
    assert len([stage for stage in report.timings if stage.name == "stop"]) == 1, (
        "no generation was started from the damaged slot"
    )
