"""Evidence made from the machines' answers has all facts for the decision, and fits into a workflow's history."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from activities.agents.convert import TIERS
from activities.agents.evidence import evidence_of, unlisted_of
from activities.agents.held_copies import REASONS, held_of
from activities.agents.rank_ends import APART, ends_of
from activities.payloads import packed_bytes
from agent.state.rank_record import exit_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import first_failure, is_victim
from everstep.model.evidence import RankExit, Unlisted
from everstep.model.machine import Assignment
from everstep.model.ranks import Ranks
from everstep.model.state_copy import Tier, count_of
from everstep.model.topology import Topology
from tests.state_copies import named, singles


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

    found = evidence_of(1, replies, [], Assignment(Topology.of(2, 1), ["m1", "m2"]))

    assert named(found.held) == [(0, "m1"), (1, "m2")]
    assert found.disk_shared


def test_files_of_one_name_on_local_disks_are_copies_of_their_own() -> None:
    replies = {
        machine: pb.StopReply(checkpoints=[checkpoint(0, 20, tier=DISK, place="/disk/rank-0", saved_ns=saved)])
        for machine, saved in (("m0", 1), ("m1", 2))
    }

    found = evidence_of(1, replies, [])

    assert named(found.held) == [(0, "m0"), (0, "m1")]
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


def test_ten_thousand_ranks_with_nine_copies_each_fit_into_a_small_payload() -> None:
    names = [f"machine-{machine:04d}" for machine in range(1280)]
    assignment = Assignment(Topology.of(machines=1280, ranks_per_machine=8, tp=8), names)
    found = evidence_of(10, answers(10_240, raised=False), [], assignment)

    assert packed_bytes(found.model_dump_json()) < 64_000
    assert sum(len(end.ranks) for end in found.exits) == 10_240
    everyone = Ranks.of(range(10_240))
    steps = (999_998, 999_999, 1_000_000)
    assert [(one.completed_steps, one.tier, one.ranks) for one in found.held] == [
        (step, tier, everyone) for step in steps for tier in (Tier.OWN, Tier.BACKUP, Tier.DISK)
    ]


def test_exceptions_of_ten_thousand_ranks_that_all_differ_fit_and_keep_their_class() -> None:
    found = evidence_of(10, answers(10_240, raised=True), [])

    assert packed_bytes(found.model_dump_json()) < 64_000
    assert sum(len(end.ranks) for end in found.exits) == 10_240
    assert {end.exception.partition(":")[0] for end in found.exits} == {"ValueError"}
    assert [len(end.exception) for end in found.exits if not end.others] == [300] * APART


def test_the_ends_of_a_few_ranks_are_kept_whole() -> None:
    found = evidence_of(10, answers(8, raised=True), [])

    assert [(end.rank, len(end.log_tail)) for end in found.exits] == [(rank, 4096) for rank in range(8)]


@st.composite
def listings(draw: st.DrawFn) -> dict[str, list[pb.HeldCheckpoint]]:
    told = st.builds(
        pb.HeldCheckpoint,
        rank=st.integers(0, 5),
        completed_steps=st.integers(1, 3),
        valid=st.booleans(),
        tier=st.sampled_from([pb.HeldCheckpoint.OWN, BACKUP, DISK]),
        generation=st.integers(1, 2),
        saved_ns=st.sampled_from([0, 1, 5, 10**12, 10**12 + 7]),
        run=st.sampled_from(["", "a"]),
    )
    return {machine: draw(st.lists(told, max_size=8)) for machine in ("m0", "m1", "m2")}


@given(listings())
def test_every_copy_is_in_exactly_the_entry_of_its_kind(told: dict[str, list[pb.HeldCheckpoint]]) -> None:
    found, _ = held_of(told)

    def kind(one: Any, rank: int, machine: str, tier: Tier) -> tuple[object, ...]:
        return rank, machine, tier, one.completed_steps, one.valid, one.generation, one.run

    wanted = {kind(one, one.rank, machine, TIERS[one.tier]) for machine, copies in told.items() for one in copies}
    assert {kind(one, one.ranks.first, one.machine, one.tier) for one in singles(found)} == wanted
    for entry in found:
        times = {
            one.saved_ns
            for machine, copies in told.items()
            for one in copies
            if kind(one, one.rank, machine, TIERS[one.tier])
            in {kind(each, each.ranks.first, each.machine, each.tier) for each in singles([entry])}
        }
        assert {entry.saved_ns, entry.last_ns} <= times
        assert entry.last_ns - entry.saved_ns < 60 * 10**9


def test_two_saves_of_a_step_that_are_far_apart_are_two_entries() -> None:
    told = [checkpoint(rank, 20, saved_ns=time_ns) for rank, time_ns in ((0, 10**12), (1, 10**12 + 5), (2, 9 * 10**12))]

    found, _ = held_of({"m0": told})

    assert [(str(one.ranks), one.saved_ns, one.last_ns) for one in found] == [
        ("0-1", 10**12, 10**12 + 5),
        ("2", 9 * 10**12, 9 * 10**12),
    ]


def test_of_very_many_reasons_the_rare_ones_are_not_kept() -> None:
    torn = [
        pb.HeldCheckpoint(rank=rank, completed_steps=-1, reason=f"slot {rank} is torn" if rank % 2 else "never used")
        for rank in range(1000)
    ]

    found, _ = held_of({"m0": torn})

    assert len(found) <= REASONS + 1
    assert Ranks.of(range(0, 1000, 2)) == next(one.ranks for one in found if one.reason == "never used")
    assert count_of(found) == 1000


ends = st.builds(
    lambda rank, kind, **fields: pb.RankEnd(rank=rank, exit=kind, **fields),
    st.integers(0, 10**4),
    st.builds(
        pb.Exit,
        kind=st.sampled_from([pb.Exit.CODE, pb.Exit.SIGNAL, pb.Exit.UNKNOWN]),
        value=st.sampled_from([0, 1, 9]),
        time_ns=st.integers(0, 10**6),
    ),
    stopped_by_us=st.booleans(),
    completed_steps=st.integers(-1, 2),
    exception=st.sampled_from(["", "ValueError: x", "RuntimeError: Connection closed by peer"]),
    log_tail=st.sampled_from(["", "boom", "a\nBroken pipe\nb"]),
    classification=st.sampled_from(
        [None, pb.Classification(reason="peer-connection", consequence=True), pb.Classification(reason="oom")]
    ),
)


@settings(max_examples=50)
@given(st.lists(ends, max_size=4 * APART, unique_by=lambda end: end.rank))
def test_the_decisions_see_the_same_ends_although_alike_ones_are_together(told: list[pb.RankEnd]) -> None:
    every = [exit_of("m0", end) for end in told]
    kept = ends_of(("m0", end) for end in told)

    first, before = first_failure(kept), first_failure(every)
    assert (first and first.rank) == (before and before.rank)

    def facts(ends: list[RankExit]) -> dict[int, tuple[object, ...]]:
        return {
            rank: (end.code, end.signal, end.stopped_by_us, end.completed_steps, end.exception, is_victim(end))
            for end in ends
            for rank in end.ranks
        }

    assert facts(kept) == facts(every)
    assert sum(len(end.ranks) for end in kept) == len(every)


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
    assert (found.disk_asked, found.searched) == (40, False)
    assert evidence_of(3, {"m2": pb.StopReply()}, []).disk_asked is None
