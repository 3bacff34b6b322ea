"""Each invariant is true for good observations, and is violated if its part of the observations is wrong."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.api.history.v1 import HistoryEvent

from controlplane.queries.status import JobReport
from drills.faults.all import drill_request
from drills.judge.compare import Comparison
from drills.judge.facts import IncidentFacts
from drills.spec.loss import Promise
from drills.spec.request import DrillRequest
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Failure, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import IncidentSummary
from everstep.model.version import JobVersion, VersionStatus
from soaks import observe
from soaks.invariants import INVARIANTS, WARM_UP, Baseline, Struck, learn, may_cost, violations
from soaks.machines import MachinesSeen
from soaks.observe import ClusterProcess, GateObservations, descriptors, files, is_failed_task, unheld
from soaks.plan import GAP, Sizes

SPEC = JobSpec(
    name="soak-01",
    script="/s.py",
    machines=4,
    ranks_per_machine=1,
    tp=2,
    checkpoint=CheckpointPolicy(disk_path="/disk", disk_every_steps=5),
)
GATE, STEP = 30, 50
KILL = drill_request(
    fault="kill-rank", ranks=[1], at_step=35, steps=200, **Sizes(ranks_per_machine=1, pp=1).model_dump()
)


def gone(*evicted: str) -> IncidentFacts:
    return closed(evicted=list(evicted))


def closed(**changes: Any) -> IncidentFacts:
    given: dict[str, Any] = {
        "headline": "Recovered in 1 s",
        "recovered": True,
        "lost_steps": 1,
        "resume_step": 35,
        "evicted": ["m1"],
    }
    given["failures"] = [Failure(generation=1, step=35, symptom=Symptom.CRASH, cause="SIGKILL")]
    report = IncidentReport.model_construct(**(given | changes))
    return IncidentFacts("incident/soak-01/0001", 1, report)


def job_report(**changes: Any) -> JobReport:
    given: dict[str, Any] = {
        "status": "running",
        "step": STEP,
        "generation": 2,
        "open_incident": None,
        "silent": [],
    }
    return JobReport.model_construct(**(given | changes))


def good() -> GateObservations:
    named = ["supervisor", "temporal", "template", "worker-0", "worker-1", *(f"agent-m{n}" for n in range(4))]
    names = [*named, *["store"] * 2, *["rank"] * 6, *["fork server"] * 4]
    return GateObservations(
        STEP,
        processes=[ClusterProcess(100 + number, name, 80.0, 20) for number, name in enumerate(names)],
        files={"m0/soak-01/report-0": 2, "m0/soak-01/checkpoint-0": 1},
        newest=STEP,
        disk_folders=3,
        report=job_report(),
        history_events=400,
        incidents=[closed()],
        generation=2,
        comparison=Comparison(losses=[]),
        redone=1,
        machines=seen_machines(),
        other_ranks=2,
    )


JOBS = {"soak-01": ["m0", "m5", "m2", "m3"], "other-01": ["m4", "m6"]}
"""m1 was lost permanently, and m5 has its place."""
POOL = {machine: job for job, machines in JOBS.items() for machine in machines}


def seen_machines(
    *, jobs: dict[str, list[str]] | None = None, unknown: str = "", without: str = "", **pool: str
) -> MachinesSeen:
    """Return what was seen of eight machines. The last machine is a standby that does not answer."""
    seen = MachinesSeen([f"m{number}" for number in range(8)], unknown=unknown)
    seen.jobs = JOBS | (jobs or {})
    seen.pool = POOL | {"m1": "quarantined", "m7": "standby"} | pool
    seen.pool.pop(without, None)
    seen.ranks = {"m1": [], **{machine: [job] for job, machines in JOBS.items() for machine in machines}}
    return seen


def ranks_of(machine: str, *jobs: str) -> MachinesSeen:
    seen = seen_machines()
    seen.ranks[machine] = list(jobs)
    return seen


HANG = Failure(generation=1, step=35, symptom=Symptom.HANG, cause="hang")
STRUCK = Struck((KILL,), (), GATE, gone=["m1"])


def warm() -> Baseline:
    found = Baseline()
    for _ in range(WARM_UP + 1):
        learn(good(), found)
    return found


def test_good_observations_violate_nothing() -> None:
    assert violations(good(), STRUCK, SPEC, warm()) == []


def with_process(name: str, **changes: Any) -> Callable[[GateObservations], None]:
    def change(seen: GateObservations) -> None:
        seen.processes = [replace(one, **changes) if one.name == name else one for one in seen.processes]

    return change


def more(name: str) -> Callable[[GateObservations], None]:
    return lambda seen: seen.processes.append(ClusterProcess(999, name, 1.0, 1))


def put(**fields: Any) -> Callable[[GateObservations], None]:
    def change(seen: GateObservations) -> None:
        for name, value in fields.items():
            setattr(seen, name, value)

    return change


WRONG: list[tuple[str, Callable[[GateObservations], None]]] = [
    ("all ranks are at the gate", put(newest=STEP + 1)),
    ("losses are equal", put(comparison=Comparison(losses=["rank 1 has another loss at step 33"]))),
    ("losses are equal", put(comparison=None)),
    ("losses are equal", put(comparison=Comparison())),
    ("recorded versions ran", put(other_versions=["v1 is recorded, and v2 ran in generation 2: step 21"])),
    ("recorded versions ran", put(versions=[JobVersion(number=2, status=VersionStatus.PENDING)])),
    ("one copy of a rank", put(copies=1)),
    ("one copy of a rank", put(blind_s=11.0)),
    ("processes are those of the job", more("rank")),
    ("processes are those of the job", more("store")),
    ("processes are those of the job", more("unknown: sleep 600")),
    (
        "processes are those of the job",
        put(processes=[*[one for one in good().processes if one.name != "rank"], ClusterProcess(9, "rank", 1.0, 1)]),
    ),
    (
        "processes are those of the job",
        put(processes=[*good().processes, *[ClusterProcess(999, "fork server", 1.0, 1)] * 5]),
    ),
    ("shared memory does not fill up", put(files={"m0/soak-01/report-0": 7})),
    ("no semaphore is left", put(unheld={"/dev/shm/sem.mp-1"})),
    ("disk does not fill up", put(disk_folders=8)),
    ("disk does not fill up", put(mounts=["/tmp/x"])),
    ("copies are where they belong", put(missing_copies="step 50 was not backed up within 20 s")),
    ("incidents are few and closed", put(incidents=[closed(), closed(lost_steps=0)])),
    ("incidents are few and closed", put(incidents=[IncidentFacts("incident/soak-01/0001", 1, None)])),
    ("crashes are reported as crashes", put(incidents=[closed(failures=[HANG])])),
    ("steps lost are few", put(incidents=[closed(lost_steps=2)], redone=2)),
    ("steps lost are few", put(incidents=[closed(lost_steps=None)])),
    ("steps lost are few", put(incidents=[closed(resume_step=-1)])),
    ("steps lost are few", put(redone=3)),
    ("steps lost are few", put(redone=None)),
    ("struck parts are back", put(unreported=["kill-agent of m1: it did not come back"])),
    ("steps lost are few", put(incidents=[closed(resume_step=GATE - 1)])),
    ("workflows do not fail", put(failed_tasks=["event 7: nondeterminism"])),
    ("histories are short", put(history_events=10_241)),
    ("memory is flat", with_process("agent-m1", memory_mb=141.0)),
    ("memory is flat", with_process("temporal", memory_mb=481.0)),
    ("descriptors are flat", with_process("worker-0", descriptors=45)),
    ("no machine is leased twice", put(shared=[("m2", ("other-01", "soak-01"))])),
    ("no machine is leased twice", put(machines=ranks_of("m2", "soak-01", "other-01"))),
    ("no machine is leased twice", put(machines=ranks_of("m7", "other-01"))),
    ("no machine is leased twice", put(machines=ranks_of("m1", "soak-01"))),
    ("no machine is leased twice", put(machines=seen_machines(unknown="the pool does not answer"))),
    ("no machine is lost", put(machines=seen_machines(without="m7"))),
    ("no machine is lost", put(machines=seen_machines(m7="quarantined"))),
    ("no machine is lost", put(machines=seen_machines(m7="provisioning"))),
    ("no machine is lost", put(machines=seen_machines(m7="soak-01"))),
    ("no machine is lost", put(machines=seen_machines(m7="another-01"))),
    ("the right machines left", put(incidents=[gone("m1", "m3")])),
    ("the second job runs", put(other=["it does not run within 60 s"])),
    ("status is true", put(report=None, silent="no worker answers")),
    ("status is true", put(report=job_report(status="recovering"))),
    ("status is true", put(report=job_report(step=STEP - 1))),
    ("status is true", put(report=job_report(generation=1))),
    ("status is true", put(report=job_report(silent=["m1"]))),
    (
        "status is true",
        put(
            report=job_report(
                open_incident=IncidentSummary.model_construct(id="incident/soak-01/0001", number=1, headline="")
            )
        ),
    ),
]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_what_is_wrong_is_named(name: str, change: Callable[[GateObservations], None]) -> None:
    seen = good()
    change(seen)
    found = violations(seen, STRUCK, SPEC, warm())
    assert found and all(text.startswith(f"{name}: ") for text in found)


def test_who_is_gone_has_to_leave_the_job() -> None:
    seen = good()
    stays = Struck((KILL,), (), GATE, gone=["m1", "m2"])
    said = "the right machines left: m2 is lost, and the job still has it"
    assert violations(seen, stays, SPEC, warm()) == [said]


def test_one_machine_of_two_jobs_is_told_by_everybody() -> None:
    seen = good()
    seen.machines = seen_machines(jobs={"other-01": ["m4", "m3"]})
    found = violations(seen, STRUCK, SPEC, warm())
    assert "no machine is leased twice: soak-01 and other-01 both have m3" in found
    assert any("the pool leases it m4, m6" in text for text in found)


def test_what_was_away_for_long_may_have_left() -> None:
    seen = good()
    seen.incidents, seen.machines = (
        [gone("m1", "m2")],
        seen_machines(m2="quarantined", jobs={"soak-01": ["m0", "m5", "m7", "m3"]}, m7="soak-01"),
    )
    seen.machines.ranks |= {"m7": ["soak-01"], "m2": []}
    assert violations(seen, Struck((KILL,), (), GATE, gone=["m1"], away=["m2"]), SPEC, warm()) == []
    assert len(violations(seen, STRUCK, SPEC, warm())) == 2


@pytest.mark.parametrize(("was", "right"), [("standby", True), ("soak-01", False)])
def test_a_standby_that_a_job_takes_may_hold_more_than_it_did(was: str, right: bool) -> None:
    found, before, now = Baseline(), good(), good()
    before.machines = seen_machines(m3=was)
    for _ in range(WARM_UP + 1):
        learn(before, found)
    with_process("agent-m3", descriptors=50, memory_mb=160.0)(now)
    assert (violations(now, STRUCK, SPEC, found) == []) is right


def test_every_invariant_was_seen_to_fail() -> None:
    assert {name for name, _ in WRONG} == {one.__name__.replace("_", " ") for one in INVARIANTS}


def request(fault: str, **options: Any) -> DrillRequest:
    return KILL.model_copy(update={"fault": drill_request(fault, **options).fault})


@pytest.mark.parametrize(
    ("fault", "status", "right"),
    [("update", "running", True), ("update", "suspect", False), ("bad-version", "running", False)]
    + [("bad-version", status, True) for status in ("suspect", "refused")],
)
def test_a_good_version_runs_at_the_gate_and_a_bad_one_does_not(fault: str, status: str, right: bool) -> None:
    seen = good()
    seen.versions = [JobVersion(number=2, status=VersionStatus(status))]
    struck = Struck((request(fault),), (), GATE, gone=["m1"])
    assert (violations(seen, struck, SPEC, warm()) == []) is right


ONE, NOTHING = Promise(1, "placed"), Promise(None, "owner and peer")


@pytest.mark.parametrize(
    ("requests", "promises", "most"),
    [
        ([KILL], [], 1),
        ([request("kill-machine", machine="m1")], [ONE], 1),
        ([request("flip-bit", where="file")], [Promise(5, "on disk")], 5),
        ([request("kill-machine", machine="m1")], [NOTHING], GAP),
        ([KILL, request("kill-machine", machine="m1")], [ONE], 1),
        ([request("kill-machine", machine="m1"), request("kill-machine", machine="m2")], [ONE, ONE], GAP),
        ([request("kill-agent", machine="m1"), request("kill-machine", machine="m2")], [ONE], GAP),
        ([request("kill-machine", machine="m2"), request("kill-worker", during="kill-machine")], [ONE], 1),
    ],
)
def test_what_may_be_lost(requests: list[DrillRequest], promises: list[Promise], most: int) -> None:
    assert may_cost(Struck(tuple(requests), tuple(promises), GATE)) == most


def test_a_process_is_measured_once_it_has_warmed_up() -> None:
    found = Baseline()
    for number in range(WARM_UP + 2):
        seen = good()
        with_process("agent-m1", memory_mb=80.0 + 100.0 * min(number, WARM_UP - 1))(seen)
        assert not [text for text in violations(seen, STRUCK, SPEC, found) if text.startswith("memory")]
        learn(seen, found)
    seen = good()
    with_process("agent-m1", memory_mb=80.0 + 100.0 * (WARM_UP - 1) + 200.0)(seen)
    assert [text for text in violations(seen, STRUCK, SPEC, found) if text.startswith("memory is flat: agent-m1")]


def test_files_are_counted_by_name_without_generations_and_identifiers(tmp_path: Path) -> None:
    folder = tmp_path / "m0" / "soak-01"
    folder.mkdir(parents=True)
    for name in ("report-3-1", "report-3-12", "report-4-1", "checkpoint-0", f"{'0f' * 16}.sock", f"{'ab' * 16}.sock"):
        (folder / name).touch()
    assert files(tmp_path) == {
        "m0/soak-01/report-3": 2,
        "m0/soak-01/report-4": 1,
        "m0/soak-01/checkpoint-0": 1,
        "m0/soak-01/*.sock": 2,
    }


def test_semaphores_that_nobody_holds_are_found(tmp_path: Path) -> None:
    for name in ("sem.mp-open", "sem.mp-mapped", "sem.mp-left", "torch_77_1_0", "report-1"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    left = {str(tmp_path / "sem.mp-left"), str(tmp_path / "torch_77_1_0")}
    with (tmp_path / "sem.mp-open").open(), (tmp_path / "sem.mp-mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        file.close()
        assert unheld(tmp_path) == left
        mapped.close()
    assert unheld(tmp_path) == left | {str(tmp_path / "sem.mp-open"), str(tmp_path / "sem.mp-mapped")}


async def test_a_semaphore_that_is_freed_soon_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"a", "before", "soon"}, {"a", "before"}])
    monkeypatch.setattr(observe, "unheld", lambda: next(looks))
    monkeypatch.setattr(observe, "FREED_S", 0.0)

    assert await observe._unheld({"before"}) == {"a", "before"}
    looks = iter([{"before"}])
    assert await observe._unheld({"before"}) == {"before"}, "nothing new was seen, so there is no second look"


def test_semaphores_that_others_left_before_the_soak_are_not_its_own() -> None:
    seen, found = good(), Baseline()
    seen.unheld = {"/dev/shm/sem.of-another"}
    assert violations(seen, STRUCK, SPEC, found) == []
    learn(seen, found)
    assert violations(seen, STRUCK, SPEC, found) == []
    seen.unheld = {"/dev/shm/sem.of-another", "/dev/shm/torch_7_1_0"}
    assert violations(seen, STRUCK, SPEC, found) == ["no semaphore is left: no process holds /dev/shm/torch_7_1_0"]


def test_a_task_that_has_to_look_again_has_not_failed() -> None:
    def failed(cause: str) -> HistoryEvent:
        event = HistoryEvent(event_type=EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED)
        event.workflow_task_failed_event_attributes.cause = WorkflowTaskFailedCause.Value(cause)
        return event

    assert not is_failed_task(HistoryEvent(event_type=EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT))
    assert not is_failed_task(failed("WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND"))
    assert is_failed_task(failed("WORKFLOW_TASK_FAILED_CAUSE_NON_DETERMINISTIC_ERROR"))
    assert is_failed_task(failed("WORKFLOW_TASK_FAILED_CAUSE_WORKFLOW_WORKER_UNHANDLED_FAILURE"))


def test_where_all_machines_are_lost_nobody_knows_how_many_steps_that_cost() -> None:
    def group(index: int) -> DrillRequest:
        sizes = Sizes(ranks_per_machine=1, pp=2).model_dump()
        return drill_request(fault="kill-group", kind="pp", index=index, at_step=35, steps=200, **sizes)

    spec = SPEC.model_copy(update={"pp": 2})
    seen = good()
    seen.incidents, seen.redone = [closed(lost_steps=None)], 15
    both = Struck((group(0), group(1)), (), GATE, gone=["m1"])
    assert [text for text in violations(seen, both, spec, warm()) if text.startswith("steps")] == []
    seen.incidents = [closed(lost_steps=None), closed(lost_steps=None)]
    assert "is not known" in "".join(violations(seen, both, spec, warm())), (
        "the groups were lost one after the other, so some machines were left each time"
    )
    seen.incidents, one = [closed(lost_steps=None)], Struck((group(0),), (), GATE, gone=["m1"])
    assert "the number of lost steps is not known" in "".join(violations(seen, one, spec, warm()))


def test_connections_of_a_process_to_itself_are_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = descriptors(os.getpid())
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            assert descriptors(os.getpid()) == before
            with socket.socket():
                assert descriptors(os.getpid()) == before + 1


def test_after_a_gate_where_machines_were_behind_more_may_be_lost() -> None:
    assert may_cost(Struck((KILL,), (), GATE, behind=True)) == GAP > may_cost(STRUCK)
