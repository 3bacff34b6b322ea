"""``everstep checkpoints`` shows the copies that exist and names what is missing."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from agent.checkpoints.tiers.listing import UNFINISHED
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from console.commands.checkpoints import lines, pairs, table
from controlplane.queries.checkpoints import CheckpointsReport, ask_for_copies, report_of
from controlplane.queries.saved import saved_report
from everstep.decisions.keep.lineage import Lineage
from everstep.errors import AgentUnreachable
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.places import Places
from everstep.model.state_copy import StateCopies, Tier
from everstep.slots.format import CUT_SHORT, NEVER_USED
from tests.activities.spoken import reached

SPEC = JobSpec(name="gpt", script="/gpt.py", machines=4, ranks_per_machine=2, tp=2, pp=2)
MACHINES = [Machine(name=f"m{index}", address=f"a{index}") for index in range(4)]
S = 10**9


def held(rank: int, step: int, tier: Tier = Tier.OWN, **more: object) -> StateCopies:
    machine = rank // 2 if tier != Tier.BACKUP else 3 - rank // 2
    given = {"bytes": 1000, "saved_ns": step * S, "generation": 1} | more
    return StateCopies.model_validate(
        {"places": {f"m{machine}": str(rank)}, "completed_steps": step, "tier": tier, **given}
    )


def everywhere(step: int, *tiers: Tier) -> list[StateCopies]:
    return [held(rank, step, tier) for rank in range(8) for tier in tiers]


def report(
    copies: list[StateCopies],
    *,
    silent: tuple[str, ...] = (),
    spec: JobSpec = SPEC,
    line: Lineage = (),
    stepping: bool = False,
) -> CheckpointsReport:
    return report_of(spec, MACHINES, copies, silent, lineage=line, stepping=stepping)


def shown(found: CheckpointsReport) -> list[list[str]]:
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(table(found, now_ns=130 * S))
    return [line.split() for line in capture.get().splitlines()]


def test_steps_are_shown_newest_first_with_the_number_of_copies_in_each_tier() -> None:
    copies = [
        *everywhere(100, Tier.DISK),
        *everywhere(120, Tier.OWN, Tier.BACKUP),
        *(held(rank, 121) for rank in range(8) if rank not in {4, 5}),
        *(held(rank, 121, Tier.BACKUP) for rank in range(4)),
    ]

    found = report(copies)

    assert [one.step for one in found.steps] == [121, 120, 100]
    assert found.restorable == [120, 100]
    assert found.steps[0].missing == [4, 5]
    assert (found.steps[1].state_bytes, found.steps[1].copies_bytes) == (8000, 16000)
    assert shown(found) == [
        ["Step", "Age", "Restorable", "Own", "Backup", "Disk", "Bytes"],
        ["121", "9.00", "s", "no:", "rank", "4,", "5", "is", "missing", "6/8", "4/8", "0/8", "6", "kB"],
        ["120", "10", "s", "yes", "8/8", "8/8", "0/8", "8", "kB"],
        ["100", "30", "s", "yes", "0/8", "0/8", "8/8", "8", "kB"],
    ]


def test_a_rank_with_several_copies_in_a_tier_counts_once() -> None:
    found = report([*everywhere(5, Tier.DISK), held(0, 5, Tier.DISK, machine="m3")])

    assert found.steps[0].ranks[Tier.DISK] == 8


def test_the_placement_is_shown_in_one_line() -> None:
    assert lines(report(everywhere(5, Tier.OWN)), None) == [
        "backups   m0 <-> m3, m1 <-> m2: every backup is outside its rank's parallel groups: "
        "the machines of any one group may be lost"
    ]


def test_disabled_backups_are_mentioned() -> None:
    spec = SPEC.model_copy(update={"checkpoint": SPEC.checkpoint.model_copy(update={"backup": False})})

    assert lines(report([], spec=spec), None) == [
        "job gpt has no checkpoint",
        "backups   there are none: backup is false in [checkpoint]",
    ]


def test_backups_of_an_ended_job_are_not_mentioned() -> None:
    assert lines(report([]), None, ended=True) == [
        "job gpt has no checkpoint: it has ended, and has no copy on disk or on remote storage"
    ]
    assert lines(report(everywhere(5, Tier.DISK)), None, ended=True) == []


def test_lag_and_problems_of_backups_are_shown() -> None:
    saved = pb.SavedState(own_step=9, backup_step=5, disk_step=-1, backup_problem="m3 hangs")
    progress = saved_report({"m0": [pb.RankProgress(rank=1, generation=1, saved=saved)]})

    said = lines(report(everywhere(9, Tier.OWN)), progress)

    assert "lag       the slowest backup is 4 steps behind own memory" in said
    assert "problem   backup of rank 1 on m0: m3 hangs" in said


def test_damaged_copies_are_named_and_unused_slots_are_not() -> None:
    bad = [held(3, 120, Tier.BACKUP, valid=False, reason="its contents do not match their checksum")]
    unused = [held(rank, -1, valid=False, reason=NEVER_USED) for rank in range(8)]

    found = report([*everywhere(120, Tier.OWN), *bad, *unused])

    assert found.damaged == bad
    assert lines(found, None)[1:] == [
        "damaged   rank 3 on m2, backup, step 120: its contents do not match their checksum"
    ]


def test_a_slot_of_an_unfinished_save_is_damaged_only_after_the_ranks_stopped() -> None:
    cut = [held(3, -1, valid=False, reason=CUT_SHORT)]

    assert report(cut, stepping=True).damaged == []
    assert report(cut).damaged == cut
    flipped = [held(3, 5, valid=False, reason="its contents do not match their checksum")]
    assert report(flipped, stepping=True).damaged == flipped


def test_copies_of_abandoned_steps_are_counted_but_not_restorable() -> None:
    copies = [*everywhere(20, Tier.DISK), *everywhere(30, Tier.DISK)]

    running, ended = report(copies, line=[(1, -1), (2, 20)]), report(copies)

    assert (running.restorable, running.disowned) == ([20], 8)
    assert "left out  8 copies of steps that the job has abandoned" in lines(running, None)
    assert ended.restorable == [30, 20]


def test_silent_machines_are_named() -> None:
    assert lines(report([], silent=("m2",)), None)[-1] == "no answer m2: their copies are not shown"


def test_mutual_backups_and_rings_are_distinguished() -> None:
    assert pairs({"m0": "m1", "m1": "m0", "m2": "m3", "m3": "m2"}) == "m0 <-> m1, m2 <-> m3"
    assert pairs({"m0": "m1", "m1": "m2", "m2": "m0"}) == "m0 -> m1, m1 -> m2, m2 -> m0"
    assert pairs({f"m{n}": f"m{(n + 1) % 20}" for n in range(20)}).endswith("m7 -> m8 and 12 more")


def test_the_json_has_all_facts() -> None:
    found = json.loads(report(everywhere(5, Tier.OWN)).model_dump_json())

    assert found["restorable"] == [5]
    assert found["steps"][0]["ranks"] == {"own memory": 8, "backup": 0, "disk": 0, "remote": 0}
    assert found["backup_machines"]["m0"] == "m3"


@pytest.mark.parametrize("verify", [False, True])
async def test_all_machines_are_asked_and_silent_machines_are_named(verify: bool) -> None:
    disk = pb.HeldCheckpoint(rank=0, completed_steps=5, valid=True, tier=pb.HeldCheckpoint.DISK, place="/shared/a")
    reply = pb.CheckpointsReply(checkpoints=[disk])
    answers = (reply, reply, AgentUnreachable("away"), pb.CheckpointsReply())
    agents = [FakeAgent(checkpoints=answer) for answer in answers]
    spec = SPEC.model_copy(update={"checkpoint": SPEC.checkpoint.model_copy(update={"disk_path": "/shared"})})

    async with reached(agents) as (pool, machines):
        copies, silent = await ask_for_copies(pool, spec, machines, verify=verify)

    assert silent == ["m2"]
    assert [(one.ranks.first, one.machine, one.tier) for one in copies] == [(0, "m0", Tier.DISK)], (
        "two machines see the same file, so it counts once"
    )
    for [one] in (agent.asked("checkpoints") for agent in agents):
        assert (one.job, one.verify, one.disk_path) == ("gpt", verify, "/shared")


def test_a_location_that_cannot_be_listed_is_unknown_and_not_damaged() -> None:
    url = "s3://b/runs cannot be listed: AccessDenied"
    path = "/mnt/x cannot be listed: No such file or directory"
    copies = [
        held(0, -1, Tier.REMOTE, valid=False, reason=url),
        *(
            held(0, -1, Tier.DISK, valid=False, reason=path, places=Places({f"m{machine}": "0"}))
            for machine in range(3)
        ),
    ]

    found = report(copies)

    assert found.damaged == []
    assert "no checkpoint of job gpt was found, but not every location could be listed" in lines(
        found, None, ended=True
    )
    assert f"unknown   {url} (seen from m0)" in lines(found, None)
    assert f"unknown   {path} (seen from m0, m1, m2)" in lines(found, None)


def test_an_unfinished_copy_on_remote_storage_is_not_damaged() -> None:
    found = report([held(rank, 160, Tier.REMOTE, valid=False, reason=UNFINISHED) for rank in (2, 6)])

    assert (found.damaged, found.unfinished) == ([], 2)
    assert any(line.startswith("unfinished 2 files on remote storage") for line in lines(found, None))
