"""Requests for drills: which options a fault has, which requests are refused, and what a drill expects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from console.commands.drill import command_of
from drills.checks import check
from drills.clusters.local import DrillCluster
from drills.faults.all import FAULTS, drill_request, fault_named, option_of, shown_options
from drills.faults.away import Away
from drills.faults.fault import Fault
from drills.faults.updates import BadVersion, Update, UpdateFault
from drills.spec.job_options import JobOptions
from drills.spec.request import DrillRequest
from drills.spec.settings import STEP_S
from everstep.errors import CannotInject, ConfigError
from everstep.model.version import JobVersion, UpdateRequest

CONTRACT = [
    *("kill-rank", "stop-rank", "exit-rank", "raise", "spin", "deadlock", "skip-collective", "hang-dataloader"),
    "wrong-order",
    *("nan", "bitflip", "slow-machine", "uneven-work", "kill-machine", "kill-group", "kill-agent", "kill-forkserver"),
    *(
        "kill-worker",
        "drain-worker",
        "kill-temporal",
        "kill-during-save",
        "xid",
        "gpu-lost",
        "machine-fault",
        "gpu-hot",
    ),
    *(
        "nic-down",
        "nic-flap",
        "switch-down",
        "disk-full",
        "fs-readonly",
        "oom",
        "link-down",
        "cut-off",
        "kill-postgres",
        "kill-workers",
        "freeze-workers",
    ),
    *("cut-link", "slow-link", "bad-version", "update"),
    *("flip-bit", "truncate-file", "shm-full", "hang-peer", "hang-agents", "kill-peer"),
]


def test_the_list_has_every_fault_of_the_contract_and_each_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert set(CONTRACT) <= set(names) and len(set(names)) == len(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_help_of_a_fault_has_its_own_options_and_those_of_the_job(fault: type[Fault]) -> None:
    shown = {option for param in command_of(fault.name, []).params for option in param.opts}
    own = {option_of(name, field) for name, field in shown_options(fault)}
    job = {option_of(name, field) for name, field in shown_options(JobOptions)}
    of_kill_rank = {"--during", "--rank", "--times", "--signal"} if fault.is_control else set()
    assert own | job <= shown
    assert shown - own - job - of_kill_rank == {"script", "--repeat", "--keep", "--json"}


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kill-rank'"):
        fault_named("kil-rank")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fault": "kill-rank", "ranks": [8]}, "ranks go from 0 to 7"),
        ({"fault": "kill-rank", "signal": "TERM"}, "KILL, SEGV, ABRT"),
        ({"fault": "kill-rank", "at_step": 50, "steps": 50}, "not reached"),
        ({"fault": "kill-rank", "tp": 3}, "not a multiple"),
        ({"fault": "kill-rank", "during": "raise"}, "is no option of kill-rank"),
        ({"fault": "raise", "exception": "Nonsense"}, "not a built-in exception"),
        ({"fault": "kill-agent", "machine": "7"}, "machines are m0, m1, m2, m3"),
        ({"fault": "cut-off", "cut_from": "m1"}, "--from m1: use one of control"),
        ({"fault": "link-down", "seconds": 3.0}, "too short to be noticed: use 6 or more"),
        ({"fault": "link-down", "seconds": 6.0, "step_seconds": 3.0}, "too short to be noticed: use 32 or more"),
        ({"fault": "kill-postgres", "seconds": 21.0}, "may be away for 20 s at most"),
        ({"fault": "kill-postgres", "at_step": 46, "steps": 50}, "the job needs 5 more steps"),
        ({"fault": "hang-peer", "seconds": 31.0}, "may hang for 30 s at most"),
        ({"fault": "kill-worker"}, "--in-stage is missing"),
        (
            {"fault": "kill-worker", "in_stage": "later"},
            "make, try, align, vote, trace, stop, evict, prepare, await, decide, diagnose, replay, restore",
        ),
        ({"fault": "kill-worker", "in_stage": "evict", "during": "kill-machine"}, "add --during kill-machine --gone"),
        ({"fault": "kill-worker", "in_stage": "stop", "moment": "then"}, "begin, middle, end"),
        ({"fault": "kill-worker", "in_stage": "make"}, "add --during update or --during bad-version"),
        ({"fault": "kill-worker", "in_stage": "stop", "during": "kill-agent"}, "opens no incident"),
        (
            {"fault": "kill-temporal", "at_event": 3},
            "--at-event is no option of kill-temporal: it is an option of kill-worker",
        ),
        ({"fault": "kill-rank", "script": ["missing.py"]}, "missing.py"),
        ({"fault": "kill-worker", "in_stage": "restore"}, "add --during kill-machine"),
        ({"fault": "kill-worker", "in_stage": "rollback"}, "add --during bad-version"),
        ({"fault": "kill-worker", "in_stage": "vote"}, "add --during slow-machine"),
        ({"fault": "kill-worker", "in_stage": "replay", "during": "bitflip"}, "add --only-in-job"),
        ({"fault": "kill-worker", "in_stage": "report", "during": "slow-machine"}, "do not report slow-machine as"),
        ({"fault": "cut-link", "between": ("m1", "m1")}, "--between needs two different machines"),
        (
            {"fault": "kill-rank", "between": ("m1", "m2")},
            "--between is no option of kill-rank: it is an option of cut-link, slow-link",
        ),
        (
            {"fault": "kill-rank", "then": "kill-rank"},
            "--then is no option of kill-rank: it is an option of kill-agent, xid",
        ),
        ({"fault": "kill-agent", "then": "spin"}, "kill-rank, kill-machine"),
        ({"fault": "kill-agent", "then": "kill-rank", "steps": 30}, "its second fault comes at step 30"),
        ({"fault": "kill-group"}, "--kind is missing"),
        ({"fault": "kill-group", "kind": "pp", "index": 4}, "pp groups go from 0 to 3"),
        ({"fault": "flip-bit"}, "--where is missing: use one of buffer, backup, file"),
        ({"fault": "flip-bit", "where": "file", "at_step": 9}, "use --at-step 10 or later"),
        ({"fault": "flip-bit", "where": "backup", "machines": 1, "tp": 1, "pp": 1}, "it needs two machines"),
        ({"fault": "shm-full", "fits": "all"}, "nothing, own"),
        ({"fault": "machine-fault"}, "--reason is missing"),
        ({"fault": "xid", "everywhere": True, "machines": 2, "pp": 1}, "use 3 or more"),
        (
            {"fault": "gpu-hot", "everywhere": True},
            "--everywhere is no option of gpu-hot: it is an option of xid, machine-fault",
        ),
        ({"fault": "kill-machine", "standby": "sick"}, "--standby needs kill-machine --gone"),
        ({"fault": "kill-machine", "gone": True, "standby": "old"}, "sick, dies, late"),
        ({"fault": "hang-agents", "count": 2}, "--count 2 of 4 machines: the breaker allows 2"),
        ({"fault": "hang-agents", "count": 4}, "use 3 to 3"),
        ({"fault": "hang-agents", "count": 3, "ranks": [2]}, "--rank 2 is on a machine whose agent hangs"),
        ({"fault": "kill-worker", "in_stage": "await", "during": "kill-machine", "gone": True}, "--standby late"),
        ({"fault": "kill-worker", "in_stage": "report", "during": "gpu-lost"}, "do not report gpu-lost as"),
        ({"fault": "update", "lazy": True}, "--lazy takes one of them"),
        ({"fault": "update", "at_step": 20, "steps": 30}, "ends before its update was tried"),
        ({"fault": "update", "then": "kill-rank"}, "--lazy takes one of them"),
        ({"fault": "update", "lazy": True, "window": 3.0, "then": "kill-rank"}, "--lazy takes one of them"),
        ({"fault": "update", "lazy": True, "then": "nan"}, "kill-rank, kill-machine, kill-forkserver"),
        ({"fault": "update", "during": "raise"}, "parked, update, kill-workers"),
        ({"fault": "update", "lazy": True, "window": 3.0, "during": "parked"}, "cannot be combined with --lazy"),
        (
            {"fault": "bad-version", "during": "parked"},
            "--during is no option of bad-version: it is an option of kill-agent, update",
        ),
        ({"fault": "nan", "only_in_job": True}, "--only-in-job is no option of nan: it is an option of bitflip"),
        ({"fault": "bitflip", "shows_every": 2}, "--shows-every needs --only-in-job"),
        ({"fault": "nan", "finite": True}, "--finite is no option of nan: it is an option of bitflip"),
        ({"fault": "bitflip", "finite": True, "machines": 1, "pp": 1}, "use 2 machines or more"),
        (
            {"fault": "bitflip", "only_in_job": True, "machines": 1, "pp": 1},
            "--only-in-job: .*: the job has only one machine",
        ),
    ],
)
def test_nonsense_is_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(drill_request(**options))


def test_a_machine_goes_by_name_or_number() -> None:
    request = drill_request(fault="kill-agent", machine="2")
    assert request.opening.struck_machine(request.spec("job", {})) == "m2"
    assert drill_request(fault="kill-agent", machine="m2") == request


def test_the_default_job_is_the_example_in_three_dimensions() -> None:
    spec = drill_request(fault="kill-rank").spec("job", {"A": "b"})
    topology = spec.topology()
    assert (topology.world_size, topology.tp, topology.pp, topology.dp) == (8, 2, 2, 2)
    assert spec.env == {"A": "b"}
    assert Path(spec.script).name == "gpt.py"
    assert spec.policy.hang.floor_s < 10


def test_a_job_file_gives_sizes_and_policy_and_options_win(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "job.toml"
    file.write_text('script = "train.py"\nmachines = 3\n[policy.hang]\nfloor_s = 77.0\n')
    spec = drill_request(fault="kill-rank", config=file).spec("job", {})
    assert (spec.machines, spec.ranks_per_machine, spec.tp) == (3, 1, 1)
    assert spec.policy.hang.floor_s == 77.0
    assert drill_request(fault="kill-rank", config=file, machines=2).spec("job", {}).machines == 2


def test_the_fault_that_opens_the_incident() -> None:
    assert drill_request(fault="kill-worker", in_stage="stop").opening.name == "kill-rank"
    assert drill_request(fault="kill-worker", in_stage="stop", during="raise").opening.name == "raise"
    assert drill_request(fault="kill-agent", during="launch").opening.name == "kill-rank"
    assert drill_request(fault="kill-agent").absorbed
    assert not drill_request(fault="kill-agent", during="launch").absorbed


def test_steps_are_handed_on_to_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    script = [str(tmp_path / "train.py"), "--lr", "1"]
    assert drill_request(fault="raise", script=script).spec("job", {}).args == ["--lr", "1"]
    assert drill_request(fault="raise", script=script, steps=9).spec("job", {}).args == ["--lr", "1", "--steps", "9"]


async def test_no_cluster_means_that_nothing_can_be_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.environ.get("EVERSTEP_HOME")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")  # no server listens there
    with pytest.raises(CannotInject, match=r"127\.0\.0\.1:1"):
        async with DrillCluster(machines=1, standbys=0, workers=1):
            pass
    assert os.environ.get("EVERSTEP_HOME") == before


def test_what_cannot_be_mounted_cannot_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for fault in ("shm-full", "disk-full"):
        with pytest.raises(CannotInject, match=f"{fault}: .* needs root"):
            check(drill_request(fault=fault))


def test_a_fault_gets_the_checkpoints_that_it_needs_and_the_users_choice_wins(tmp_path: Path) -> None:
    spec = drill_request(fault="kill-machine").spec("job", {}, disk=tmp_path / "disk")
    assert (spec.checkpoint.disk_every_steps, spec.checkpoint.disk_path) == (5, str(tmp_path / "disk"))
    assert spec.args[-2:] == ["--step-seconds", "0.2"]
    assert drill_request(fault="kill-rank").spec("job", {}).checkpoint.disk_every_steps == 0
    assert "--step-seconds" not in drill_request(fault="kill-rank").spec("job", {}).args
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "job.toml"
    file.write_text('script = "train.py"\nmachines = 4\n[checkpoint]\ndisk_every_steps = 2\n')
    spec = drill_request(fault="truncate-file", config=file).spec("job", {}, disk=tmp_path / "disk")
    assert (spec.checkpoint.disk_every_steps, spec.checkpoint.disk_path) == (2, str(tmp_path / "disk"))


def test_what_a_job_deserves_follows_from_fault_and_options() -> None:
    assert drill_request(fault="hang-peer").absorbed
    cut_off = drill_request(fault="cut-off", seconds=20)
    assert cut_off.absorbed and not cut_off.waits_at_hold, (
        "if the job waited while an agent is silent, that would be an incident"
    )
    assert cut_off.opening.steps_after > 20 / STEP_S
    assert not drill_request(fault="link-down").absorbed and not drill_request(fault="kill-rank").opening.needs_network
    assert not drill_request(fault="kill-agent", then="kill-rank").absorbed
    assert drill_request(fault="shm-full").opening.parks
    assert not drill_request(fault="shm-full", fits="own").opening.parks
    assert drill_request(fault="flip-bit", where="file", at_step=12).strike_hold == 12
    assert drill_request(fault="kill-peer", at_step=12).strike_hold == 22
    assert drill_request(fault="kill-machine").strike_hold is None
    during = drill_request(fault="kill-worker", in_stage="restore", during="kill-machine", machine="1")
    check(during)
    assert during.opening.name == "kill-machine" and not during.opening.by_ranks


@pytest.mark.parametrize(
    ("fault", "marks"),
    [
        ("link-down", ["link-down"]),
        ("cut-off", ["cut-off"]),
        ("kill-postgres", ["kill-postgres", "strike"]),
        ("kill-workers", ["kill-workers", "strike"]),
        ("hang-peer", ["hang-peer"]),
    ],
)
def test_what_the_injector_has_to_do_is_planned(fault: str, marks: list[str]) -> None:
    assert [*drill_request(fault=fault).opening.marks] == marks


def test_what_needs_a_network_is_refused_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for fault in [fault.name for fault in FAULTS if issubclass(fault, Away) and fault.needs_network]:
        with pytest.raises(CannotInject, match=f"{fault}: .*need root"):
            check(drill_request(fault=fault))


def test_a_nan_of_a_machine_comes_again_and_one_of_a_rank_does_not() -> None:
    assert drill_request(fault="nan", ranks=[1]).opening.repeats == 1
    bound = drill_request(fault="nan", machine="1")
    assert bound.opening.repeats == 3

    planned = bound.opening.rank_entries(20, bound.spec("job", {}), Path("plan"))
    assert [(fault["machine"], fault["point"], fault["at_step"]) for fault in planned] == [("m1", "begin", 20)] * 3


@pytest.mark.parametrize(
    ("options", "incidents", "generations"),
    [
        ({"fault": "update"}, 1, 2),
        ({"fault": "update", "during": "parked"}, 1, 4),
        ({"fault": "update", "during": "update"}, 1, 2),
        ({"fault": "bad-version", "at_start": True}, 0, 1),
        ({"fault": "bad-version", "fails_after": 0}, 1, 3),
        ({"fault": "bad-version", "fails_after": 2}, 2, 3),
        ({"fault": "kill-worker", "during": "update", "in_stage": "align"}, 1, 2),
    ],
)
def test_what_an_update_deserves(options: dict[str, Any], incidents: int, generations: int) -> None:
    request = drill_request(**options)
    check(request)
    assert isinstance(request.opening, UpdateFault)
    assert (request.opening.incidents_due, request.opening.launches_due) == (incidents, generations)
    assert request.waits_at_hold, "the job must not end before the update"


def test_a_reference_changes_the_rate_where_the_record_says(tmp_path: Path) -> None:
    update = Update(during="update")
    spec = DrillRequest(fault=update).spec("job", {})
    asked = [update.request_of(spec, tmp_path, number) for number in (0, 1)]
    versions = [
        JobVersion(number=1, ranges=[(1, 0, 11)]),
        *(
            JobVersion(number=number + 2, request=UpdateRequest.model_validate(asked[number]), ranges=ranges)
            for number, ranges in ((0, []), (1, [(2, 11, -1)]))
        ),
    ]
    assert update.reference(spec, versions).args == [*spec.args, "--lr-from", "11", "0.004"]
    assert BadVersion().reference(spec, versions) == spec
