"""Evidence made from the machines' answers has all facts for the decision, and fits into a workflow's history."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.agents.evidence import (
    HELD_LIMIT,
    TAILS,
    bounded,
    bounded_exits,
    evidence_of,
    nearest_of_each,
    unlisted_of,
)
from activities.payloads import packed_bytes
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import first_failure, is_victim
from everstep.model.evidence import RankExit, Unlisted
from everstep.model.state_copy import StateCopy, Tier
from tests.rank_ends import exited


def test_evidence_keeps_unknown_ends_unknown() -> None:
    reply = pb.StopReply(
        ranks=[
            pb.RankEnd(rank=1, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=5), completed_steps=20),
            pb.RankEnd(rank=0, exit=pb.Exit(kind=pb.Exit.UNKNOWN, time_ns=6), stopped_by_us=True),
        ],
        checkpoints=[pb.HeldCheckpoint(rank=1, completed_steps=20, valid=False, reason="checksum")],
    )

    found = evidence_of(1, {"m0": reply}, ["m1"])

    assert [(end.rank, end.code, end.signal) for end in found.exits] == [(0, None, None), (1, None, 9)]
    assert found.held[0].reason == "checksum"
    assert found.unreachable == ["m1"]


def test_an_agent_says_what_ended_its_ranks_and_is_believed() -> None:
    told = pb.Classification(fault="hang", owner="unknown", reason="gloo-timeout", consequence=True, evidence=["late"])
    end: dict[str, Any] = {"exit": pb.Exit(kind=pb.Exit.CODE, value=1, time_ns=5), "exception": "KeyError: 3"}
    ranks = [pb.RankEnd(rank=0, classification=told, **end), pb.RankEnd(rank=1, stopped_by_us=True, **end)]

    first, second = (end.classification for end in evidence_of(1, {"m0": pb.StopReply(ranks=ranks)}, []).exits)

    assert first
    assert (first.reason, first.consequence, first.evidence, first.place) == ("gloo-timeout", True, ["late"], "")
    assert second is None, "rank 1 lived until the stop, so its end has no class"


def checkpoint(rank: int, step: int, **more: Any) -> pb.HeldCheckpoint:
    return pb.HeldCheckpoint(rank=rank, completed_steps=step, valid=True, **more)


DISK, BACKUP = pb.HeldCheckpoint.DISK, pb.HeldCheckpoint.BACKUP


def test_evidence_says_where_copies_lie_and_which_machines_know_nothing() -> None:
    told = checkpoint(1, 20, tier=BACKUP, generation=3, saved_ns=7, bytes=5)

    found = evidence_of(3, {"m0": pb.StopReply(checkpoints=[told]), "m1": pb.StopReply(unknown=True)}, [])

    assert found.emptied == ["m1"]
    [one] = found.held
    assert (one.tier, one.machine, one.generation, one.saved_ns, one.bytes) == (Tier.BACKUP, "m0", 3, 7, 5)


def test_a_file_in_a_shared_folder_is_one_copy_at_the_machine_that_needs_it() -> None:
    same = [checkpoint(rank, 20, tier=DISK, place=f"/nfs/rank-{rank}", digest="d") for rank in (0, 1)]
    replies = {machine: pb.StopReply(checkpoints=same) for machine in ("m0", "m1", "m2")}

    found = evidence_of(1, replies, [], {0: "m1", 1: "m2"})

    assert [(one.rank, one.machine) for one in found.held] == [(0, "m1"), (1, "m2")]
    assert found.disk_shared


def test_files_of_one_name_on_local_disks_are_copies_of_their_own() -> None:
    replies = {
        machine: pb.StopReply(checkpoints=[checkpoint(0, 20, tier=DISK, place="/disk/rank-0", saved_ns=saved)])
        for machine, saved in (("m0", 1), ("m1", 2))
    }

    found = evidence_of(1, replies, [])

    assert [one.machine for one in found.held] == ["m0", "m1"]
    assert not found.disk_shared


def answers(ranks: int, *, raised: bool) -> dict[str, pb.StopReply]:
    """Return the answers of machines with 8 ranks each. Each rank has copies of three steps in three tiers."""
    random = Random(ranks)
    told: dict[str, pb.StopReply] = {}
    for machine in range(ranks // 8):
        here = range(8 * machine, 8 * machine + 8)
        told[f"machine-{machine:04d}"] = pb.StopReply(
            ranks=[
                pb.RankEnd(
                    rank=rank,
                    pid=random.randrange(1 << 22),
                    exit=pb.Exit(kind=pb.Exit.CODE, value=1, time_ns=10**18 + random.randrange(10**10)),
                    completed_steps=10**6,
                    stopped_by_us=not raised,
                    exception=f"ValueError: {random.randbytes(200).hex()}" if raised else "",
                    log_tail="x" * 4096,
                )
                for rank in here
            ],
            checkpoints=[
                checkpoint(
                    rank,
                    step,
                    tier=tier,
                    bytes=10**10 + random.randrange(10**6),
                    saved_ns=10**18 + random.randrange(10**10),
                    generation=10,
                    digest=random.randbytes(16).hex() if tier == DISK else "",
                    run="a1b2c3d4e5f6",
                )
                for rank in here
                for tier in (pb.HeldCheckpoint.OWN, BACKUP, DISK)
                for step in (999_998, 999_999, 1_000_000)
            ],
        )
    return told


def test_a_thousand_ranks_fit_into_a_payload_of_temporal_with_all_copies_of_a_step() -> None:
    found = evidence_of(10, answers(1024, raised=False), [])

    assert packed_bytes(found.model_dump_json()) < 200_000
    assert {(one.rank, one.tier) for one in found.held if one.completed_steps == 10**6} == {
        (rank, tier) for rank in range(1024) for tier in (Tier.OWN, Tier.BACKUP, Tier.DISK)
    }
    assert found.left_out == "6144 of 9216 copies, the output of 1024 of 1024 ranks"


@pytest.mark.parametrize(("raised", "each"), [(False, 2), (True, 1)])
def test_ten_thousand_ranks_fit_and_it_is_said_what_does_not(raised: bool, each: int) -> None:
    found = evidence_of(10, answers(10_240, raised=raised), [])

    assert packed_bytes(found.model_dump_json()) < 1_000_000
    assert len(found.exits) == 10_240
    assert {one.completed_steps for one in found.held} == {10**6}
    assert len(found.held) == each * 10_240
    assert {one.tier for one in found.held} == set(list(Tier)[:each])
    assert found.left_out.startswith(f"{92_160 - each * 10_240} of 92160 copies, the output of ")
    assert ("the end of 10240 exceptions" in found.left_out) == raised


def test_what_fits_is_kept_whole_and_nothing_is_said() -> None:
    assert evidence_of(10, answers(8, raised=True), []).left_out == ""


copies = st.builds(
    StateCopy,
    rank=st.integers(0, 3),
    machine=st.sampled_from(["m0", "m1"]),
    completed_steps=st.integers(0, 9),
    valid=st.booleans(),
    tier=st.sampled_from(list(Tier)),
)


def newest_whole_step(held: list[StateCopy], everybody: set[int]) -> int:
    steps = {one.completed_steps for one in held}
    whole = [s for s in steps if {one.rank for one in held if one.valid and one.completed_steps == s} == everybody]
    return max(whole, default=-1)


@given(st.lists(copies, max_size=60), st.integers(0, 60))
def test_the_newest_step_that_all_ranks_hold_survives_any_limit_with_all_its_copies(
    held: list[StateCopy], limit: int
) -> None:
    kept = bounded(held, limit=limit)

    everybody = {one.rank for one in held}
    step = newest_whole_step(held, everybody)
    assert newest_whole_step(kept, everybody) == step
    assert sum(one.completed_steps == step and one.valid for one in kept) == sum(
        one.completed_steps == step and one.valid for one in held
    )
    assert bounded(held, limit=HELD_LIMIT) == held


def test_a_step_that_is_asked_for_comes_first() -> None:
    held = [StateCopy(rank=rank, machine="m0", completed_steps=step) for rank in (0, 1) for step in (5, 10, 15)]

    assert {one.completed_steps for one in bounded(held, at=5, limit=3)} == {5}


ends = st.builds(
    RankExit,
    rank=st.integers(0, 10**6),
    machine=st.just("m0"),
    code=st.sampled_from([None, 0, 1]),
    signal=st.sampled_from([None, 9]),
    time_ns=st.integers(0, 10**6),
    stopped_by_us=st.booleans(),
    exception=st.sampled_from(["", "ValueError: x", "RuntimeError: Connection closed by peer"]),
    log_tail=st.sampled_from(["", "boom", "a\nBroken pipe\nb"]),
)


@settings(max_examples=30)
@given(st.lists(ends, min_size=TAILS, max_size=3 * TAILS, unique_by=lambda end: end.rank))
def test_the_first_failure_is_the_same_without_the_output_that_was_left_out(exits: list[RankExit]) -> None:
    kept = bounded_exits(exits)

    first, before = first_failure(kept), first_failure(exits)
    assert (first and first.rank) == (before and before.rank)
    assert [is_victim(end) for end in kept if not end.stopped_by_us] == [
        is_victim(end) for end in exits if not end.stopped_by_us
    ]


@given(st.lists(copies, max_size=60), st.integers(1, 2))
def test_the_newest_step_that_all_ranks_hold_survives_with_a_copy_of_each(held: list[StateCopy], each: int) -> None:
    everybody = {one.rank for one in held}
    step = newest_whole_step(held, everybody)
    kept = nearest_of_each(held, each)
    if step >= 0:
        assert newest_whole_step(kept, everybody) == step
    assert all(count <= each for count in Counter(one.rank for one in kept if one.valid).values())


def no_disk(reason: str) -> pb.HeldCheckpoint:
    return pb.HeldCheckpoint(completed_steps=-1, tier=pb.HeldCheckpoint.DISK, reason=reason, place="m:/mnt")


def test_what_could_not_be_looked_at_is_named_by_reason_and_remote_storage_is_one_place() -> None:
    away = pb.HeldCheckpoint(completed_steps=-1, tier=pb.HeldCheckpoint.REMOTE, reason="denied", place="s3://")
    told = {"m0": [no_disk("hangs")], "m1": [no_disk("hangs"), away], "m2": []}

    disks = [
        Unlisted(tier=Tier.DISK, machines=["m0", "m1"], reason="hangs"),
        Unlisted(tier=Tier.DISK, machines=["m3"], reason="its agent does not answer"),
    ]
    assert unlisted_of(told, ["m3"], remote_asked=True) == disks, (
        "m0 and m2 could list remote storage, so it is not unlisted"
    )
    only_m1 = {"m1": told["m1"]}
    assert unlisted_of(only_m1, remote_asked=True)[-1] == Unlisted(tier=Tier.REMOTE, reason="denied")
    assert unlisted_of({}, ["m0"], remote_asked=True)[-1] == Unlisted(tier=Tier.REMOTE, reason="no agent answers")
    assert [one.tier for one in unlisted_of({"m0": []}, ["m1"])] == [Tier.DISK], "remote storage was not asked"


def test_a_stop_says_which_disks_are_unknown_and_which_steps_were_asked_for() -> None:
    replies = {
        "m0": pb.StopReply(checkpoints=[no_disk("hangs")], disk_asked=0),
        "m1": pb.StopReply(disk_asked=40),
        "m2": pb.StopReply(unknown=True),
    }
    found = evidence_of(3, replies, [])

    assert found.unlisted == [Unlisted(tier=Tier.DISK, machines=["m0"], reason="hangs")]
    assert (found.disk_asked, found.searched, found.held_cut) == (40, False, False)
    assert evidence_of(3, {"m2": pb.StopReply()}, []).disk_asked is None


def test_a_victim_stays_one_where_its_output_is_left_out() -> None:
    """The exception alone does not show that the rank is a victim. Only its output does."""
    closed = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4213"
    tail = (
        f"{closed}\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: stage 1\n"
    )
    exits = [
        exited(rank=rank, machine="m0", code=1, time_ns=rank, exception="RuntimeError: stage 1", log_tail=tail)
        for rank in range(2 * TAILS)
    ]
    last = bounded_exits(exits)[-1]

    assert last.log_tail == ""
    assert is_victim(last)
    assert last.classification is not None
    assert (last.classification.reason, last.classification.evidence) == ("peer-connection", [])
