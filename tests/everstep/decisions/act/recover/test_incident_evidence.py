"""The facts that an incident takes from evidence: the failure, the copies that are left, and the lost steps."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.blame.first_failure import MACHINE_LOST
from everstep.decisions.keep.choose_restore import Restore
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.places import Places
from everstep.model.state_copy import Restored, StateCopies, Tier
from tests.rank_ends import exited
from tests.state_copies import singles

SPEC = JobSpec(name="job", script="/job.py", machines=3, ranks_per_machine=2)
MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(3)]
GLOO = "RuntimeError: Connection closed by peer [127.0.0.12]:4213"


def case(symptom: Symptom = Symptom.CRASH, **fields: Any) -> IncidentState:
    anomaly = Anomaly(id="m0-1", generation=1, symptom=symptom, headline="seen from outside")
    given: dict[str, Any] = {"generation": 1, "resume_step": 0, "lineage": [(1, 0)]} | fields
    return IncidentState(number=1, spec=SPEC, machines=MACHINES, anomaly=anomaly, **given)


def stopped(step: int, ranks: range = range(6), **more: Any) -> list[RankExit]:
    return [
        RankExit(rank=rank, machine=f"m{rank // 2}", signal=9, stopped_by_us=True, completed_steps=step, **more)
        for rank in ranks
    ]


def held(step: int, ranks: range = range(6), **more: Any) -> list[StateCopies]:
    return [
        StateCopies.one(rank=rank, machine=f"m{rank // 2}", completed_steps=step, generation=1, **more)
        for rank in ranks
    ]


def backups(step: int, ranks: range, machine: str) -> list[StateCopies]:
    return [
        StateCopies.one(rank=rank, machine=machine, completed_steps=step, generation=1, tier=Tier.BACKUP)
        for rank in ranks
    ]


def m2_empty(**more: Any) -> Evidence:
    """m2 lost its memory. A rank on m0 failed because its connection broke, and the other ranks were stopped."""
    victim = exited(rank=1, machine="m0", code=1, time_ns=5, completed_steps=20, exception=GLOO)
    exits = [victim, *stopped(21, range(2, 4)), *stopped(20, range(1))]
    copies = [*held(20, range(4)), *backups(20, range(4, 6), "m1")]
    return Evidence(generation=1, exits=exits, held=copies, emptied=["m2"], **more)


def test_an_emptied_machine_is_the_cause_and_not_the_rank_whose_connection_broke() -> None:
    state = case()
    evidence = state.merge_evidence(m2_empty())

    failure = state.read_failure(evidence, now_ns=9, first=True)

    assert state.explain(evidence) == "m2 came back empty and lost ranks 4, 5"
    assert (failure.cause, failure.symptom, failure.step) == (MACHINE_LOST, Symptom.CRASH, 21)


def test_ranks_of_an_emptied_machine_are_restored_from_their_backups_and_later_steps_are_lost() -> None:
    state = case()
    evidence = state.merge_evidence(m2_empty())
    state.read_failure(evidence, now_ns=9, first=True)

    restore = state.choose(evidence)
    state.record_launch(restore)

    assert restore.step == 20
    assert [(copy.ranks.first, copy.tier, copy.machine) for copy in restore.copies] == [
        (4, Tier.BACKUP, "m1"),
        (5, Tier.BACKUP, "m1"),
    ]
    assert state.lost_steps == 1, "the ranks on other machines had completed step 21, so step 21 is lost"
    assert (state.generation, state.resume_step, state.launches) == (2, 20, [(2, 20)])


def test_an_emptied_machine_is_reported_once_and_remembered_until_the_next_launch() -> None:
    state = case()
    state.merge_evidence(m2_empty())

    again = state.merge_evidence(m2_empty().model_copy(update={"emptied": []}))
    assert again.emptied == ["m2"]
    state.record_launch(Restore(20, ""))
    assert state.merge_evidence(Evidence(generation=2)).emptied == []


def test_a_machine_without_a_launch_of_the_job_lost_nothing() -> None:
    state = case(Symptom.LAUNCH_FAILED)
    evidence = state.merge_evidence(Evidence(generation=1, emptied=["m2"]))

    failure = state.read_failure(evidence, now_ns=9, first=True)

    assert (failure.symptom, failure.cause) == (Symptom.LAUNCH_FAILED, "launch failed")
    assert state.explain(evidence) == ""


def test_if_all_machines_are_emptied_the_number_of_lost_steps_is_not_known() -> None:
    state = case()
    copies = held(120, tier=Tier.DISK)
    evidence = state.merge_evidence(Evidence(generation=1, held=copies, emptied=["m0", "m1", "m2"]))

    failure = state.read_failure(evidence, now_ns=9, first=True)
    state.record_launch(state.choose(evidence))

    assert failure.step == 120, "a step that was saved had been completed"
    assert state.resume_step == 120
    assert state.lost_steps is None


def test_lost_steps_count_from_the_generation_before_if_a_restart_made_no_step() -> None:
    state = case()
    state.read_failure(
        state.merge_evidence(Evidence(generation=1, exits=stopped(21), held=held(20))), now_ns=1, first=True
    )
    state.record_launch(Restore(20, ""))
    copies = [*held(20, range(4)), *backups(20, range(4, 6), "m1")]
    evidence = state.merge_evidence(Evidence(generation=2, exits=stopped(-1, range(4)), held=copies, emptied=["m2"]))

    failure = state.read_failure(evidence, now_ns=2, first=False)
    state.record_launch(state.choose(evidence))

    assert (failure.cause, failure.step, state.resume_step) == (MACHINE_LOST, 20, 20)
    assert state.lost_steps == 1, "step 21 of the first generation is lost"


def test_lost_steps_count_from_the_farthest_step_of_all_attempts() -> None:
    state = case()
    state.read_failure(state.merge_evidence(Evidence(generation=1, exits=stopped(25))), now_ns=1, first=True)
    state.record_launch(Restore(20, ""))
    state.read_failure(state.merge_evidence(Evidence(generation=2, exits=stopped(22))), now_ns=2, first=False)
    state.record_launch(Restore(21, ""))

    assert state.lost_steps == 4


def test_a_copy_that_failed_is_not_chosen_again_until_the_job_is_resumed() -> None:
    state = case()
    evidence = state.merge_evidence(m2_empty())
    on_disk = [
        StateCopies.one(rank=4, machine="m2", completed_steps=20, generation=1, tier=Tier.DISK),
        *[copy.model_copy(update={"completed_steps": 19}) for copy in evidence.held],
    ]
    evidence = evidence.model_copy(update={"held": [*evidence.held, *on_disk]})
    bad = StateCopies.one(rank=4, machine="m1", completed_steps=20, tier=Tier.BACKUP, valid=False, reason="checksum")

    assert state.record_restored(Restored(failed=[bad]))
    second = state.choose(evidence)
    assert (second.step, singles(second.copies)[0].tier) == (20, Tier.DISK)
    assert "checksum" in second.reason
    assert state.record_restored(Restored(unreached=[bad.changed(places=Places({"m2": "4"}), tier=Tier.DISK)]))
    assert state.choose(evidence).step == 19
    assert [copy.tier for copy in state.unreached] == [Tier.DISK]
    assert not state.record_restored(Restored())

    state.begin_again()
    assert state.choose(evidence).step == 20


def test_copies_of_an_earlier_run_of_the_name_are_not_chosen() -> None:
    state = case(lineage=[(7, -1)], generation=7, resume_step=-1)
    old = [copy.model_copy(update={"generation": 3, "tier": Tier.REMOTE}) for copy in held(500)]

    assert state.choose(Evidence(generation=7, held=old)).step == -1


@pytest.mark.parametrize(("saved", "step", "folder"), [(None, 120, "/disk/old/step-000000120"), (125, 125, "")])
def test_a_job_that_was_started_from_a_folder_begins_there_again_until_it_saved_a_step(
    saved: int | None, step: int, folder: str
) -> None:
    state = case(lineage=[(1, -1)], resume_step=120, folder="/disk/old/step-000000120", folder_step=120)

    restore = state.choose(Evidence(generation=1, held=held(saved) if saved else []))

    assert (restore.step, restore.folder) == (step, folder)
    state.record_launch(restore)
    assert state.launches == [(2, -1 if folder else 125)]


CORRUPT = "everstep.errors.CorruptCheckpoint: /dev/shm/job/checkpoint-1: the state after step 20 is damaged"


def raised(rank: int, exception: str, **more: Any) -> RankExit:
    return exited(rank=rank, machine=f"m{rank // 2}", code=1, time_ns=3, exception=exception, **more)


def test_a_slot_that_its_rank_reported_as_damaged_is_named_and_not_chosen() -> None:
    state = case(generation=2, resume_step=20, lineage=[(1, 0), (2, 20)])
    exits = [raised(1, CORRUPT), *stopped(-1, range(2, 6))]
    copies = [*held(20), *held(19), *backups(20, range(1, 2), "m2")]

    restore = state.choose(state.merge_evidence(Evidence(generation=2, exits=exits, held=copies)))

    assert restore.step == 20
    assert [(copy.ranks.first, copy.tier) for copy in restore.copies] == [(1, Tier.BACKUP)]
    assert "rank 1 on m0: its rank could not restore it" in restore.reason

    again = state.choose(state.merge_evidence(Evidence(generation=2, exits=exits, held=[*held(20), *held(19)])))
    assert again.step == 19, "rank 1 has no other copy of step 20"


@pytest.mark.parametrize(
    ("ends", "resume_step", "lineage"),
    [
        ([raised(1, CORRUPT, stopped_by_us=True)], 20, [(2, 20)]),
        ([raised(1, "ValueError: CorruptCheckpoint")], 20, [(2, 20)]),
        ([raised(1, CORRUPT)], 20, [(2, -1)]),  # the rank restored from a folder, and not from this slot
        ([raised(1, CORRUPT)], 10, [(2, 10)]),  # the rank restored another step
    ],
)
def test_only_the_slot_from_which_a_rank_restored_is_left_out(
    ends: list[RankExit], resume_step: int, lineage: list[tuple[int, int]]
) -> None:
    state = case(generation=2, resume_step=resume_step, lineage=lineage)
    evidence = state.merge_evidence(
        Evidence(generation=2, exits=ends, held=[one.model_copy(update={"generation": 2}) for one in held(20)])
    )

    assert not state.bad
    assert state.choose(evidence).step == 20


def test_a_verified_slot_is_not_verified_again_before_the_next_launch() -> None:
    state = case()
    evidence = state.merge_evidence(
        Evidence(generation=1, exits=stopped(20), held=[*held(20, verified=False), *held(19, verified=False)])
    )
    first = state.choose(evidence)
    assert [copy.ranks.first for copy in first.unverified] == [0, 1, 2, 3, 4, 5]

    failed = [first.unverified[5].changed(valid=False, reason="its contents do not match")]
    assert state.record_restored(Restored(verified=list(first.unverified[:5]), failed=failed))

    second = state.choose(evidence)
    assert (second.step, len(second.unverified)) == (19, 6), (
        "these slots hold another step, so they are not verified yet"
    )
    with_backup = state.choose(evidence.model_copy(update={"held": [*evidence.held, *backups(20, range(5, 6), "m0")]}))
    assert (with_backup.step, with_backup.unverified) == (20, ())
    assert [(copy.ranks.first, copy.tier) for copy in with_backup.copies] == [(5, Tier.BACKUP)]

    state.record_launch(with_backup)
    assert not state.verified, "after a launch, the ranks may have changed the slots"
