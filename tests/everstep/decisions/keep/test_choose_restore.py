"""The step from which a job continues, and the copies that it restores."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.agents.held_copies import held_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_restore import NOTHING_HELD, choose_restore, readers
from everstep.errors import CheckpointError
from everstep.model.machine import Assignment
from everstep.model.ranks import Ranks
from everstep.model.state_copy import StateCopies, Tier, count_of
from everstep.model.topology import Topology
from everstep.slots.format import NEVER_USED
from tests.state_copies import singles


def held(
    rank: int,
    step: int,
    valid: bool = True,
    *,
    tier: Tier = Tier.OWN,
    machine: str = "",
    generation: int = 0,
    verified: bool = True,
) -> StateCopies:
    return StateCopies.one(
        rank=rank,
        machine=machine or f"m{rank}",
        completed_steps=step,
        valid=valid,
        reason="" if valid else "checksum",
        tier=tier,
        generation=generation,
        verified=verified,
    )


def size(ranks: int) -> Assignment[str]:
    """Return the machines of a job with one rank on each machine."""
    return Assignment(Topology.of(ranks, 1), [f"m{index}" for index in range(ranks)])


FOUR = Assignment(Topology.of(4, 2, 2, 2), ["m0", "m1", "m2", "m3"])
"""Eight ranks on four machines; m0 and m3 hold each other's backups, and so do m1 and m2."""


def memory_of(machine: int, step: int) -> list[StateCopies]:
    """Return the copies in the memory of a machine of ``FOUR``: of its own ranks, and backups of its peer's ranks."""
    own = [held(rank, step, machine=f"m{machine}") for rank in (2 * machine, 2 * machine + 1)]
    peer = 3 - machine
    return [*own, *(held(r, step, tier=Tier.BACKUP, machine=f"m{machine}") for r in (2 * peer, 2 * peer + 1))]


def test_the_newest_step_that_all_ranks_have_is_chosen() -> None:
    choice = choose_restore([held(0, 20), held(0, 21), held(1, 20), held(1, 19)], size(2))

    assert (choice.step, choice.copies) == (20, ())
    assert choice.reason == "step 20 is the latest step that all 2 ranks can restore: all 2 from their own memory"


def test_a_damaged_copy_does_not_count_and_is_named() -> None:
    choice = choose_restore([held(0, 20), held(0, 19), held(1, 20, valid=False), held(1, 19)], size(2))

    assert choice.step == 19
    assert "rank 1 on m1: checksum" in choice.reason


def test_a_damaged_copy_of_another_tier_is_named_with_it() -> None:
    choice = choose_restore([held(0, 20), held(0, 20, valid=False, tier=Tier.BACKUP, machine="m1")], size(1))

    assert choice.step == 20
    assert "rank 0 on m1 (backup): checksum" in choice.reason


def test_an_unused_slot_is_not_damaged() -> None:
    unused = StateCopies.one(rank=0, machine="m0", completed_steps=-1, valid=False, reason=NEVER_USED)

    assert "m0" not in choose_restore([held(0, 20), unused], size(1)).reason
    assert choose_restore([unused], size(1)).step == 0


def test_without_any_checkpoint_the_script_decides() -> None:
    assert choose_restore([], size(2)).step == NOTHING_HELD


def test_lost_checkpoints_are_distinguished_from_a_script_without_checkpoints() -> None:
    choice = choose_restore([], size(2), held_before=True)

    assert (choice.step, choice.reason) == (0, "the checkpoints that the job had are lost")


def test_without_a_common_step_the_job_starts_over_and_the_missing_ranks_are_named() -> None:
    choice = choose_restore([held(0, 7)], size(3))

    assert choice.step == 0
    assert "step 7 lacks rank 1, 2" in choice.reason


def test_ranks_of_lost_machines_take_their_backups() -> None:
    lost = {1, 3}  # these machines are a group of ``FOUR``; their peers are m2 and m0
    choice = choose_restore([one for machine in (0, 2) for one in memory_of(machine, 120)], FOUR)

    assert choice.step == 120
    assert choice.reason == (
        "step 120 is the latest step that all 8 ranks can restore: 4 from their own memory, 4 from backups (m0, m2)"
    )
    assert {copy.ranks.first // 2 for copy in singles(choice.copies)} == lost
    assert [(copy.ranks.first, copy.tier, copy.machine) for copy in singles(choice.copies)] == [
        (2, Tier.BACKUP, "m2"),
        (3, Tier.BACKUP, "m2"),
        (6, Tier.BACKUP, "m0"),
        (7, Tier.BACKUP, "m0"),
    ]


def test_owner_and_peer_lost_together_fall_back_to_disk_and_the_reason_has_the_cost() -> None:
    disk = [held(rank, 105, tier=Tier.DISK, machine=f"m{rank // 2}") for rank in range(8)]
    choice = choose_restore([*memory_of(0, 120), *memory_of(3, 120), *disk], FOUR)

    assert choice.step == 105
    assert "all 8 from disk (m0, m1, m2, m3)" in choice.reason
    assert (
        "; 15 steps older than the newest copy (step 120): owner and peer of ranks 2, 3, 4, 5 were lost together"
        in (choice.reason)
    )


def test_only_ranks_that_need_it_use_a_deeper_tier() -> None:
    memory = [*memory_of(0, 120), *memory_of(3, 120)]
    disk = [held(rank, 120, tier=Tier.DISK, machine=f"m{rank // 2}") for rank in range(8)]
    choice = choose_restore([*disk, *memory], FOUR)

    assert [(copy.ranks.first, copy.tier) for copy in singles(choice.copies)] == [
        (rank, Tier.DISK) for rank in (2, 3, 4, 5)
    ]
    assert "4 from their own memory, 4 from disk (m1, m2); not older: owner and peer" in choice.reason


def test_memory_without_a_common_step_is_distinguished_from_lost_memory() -> None:
    disk = [held(rank, 10, tier=Tier.DISK) for rank in range(2)]
    choice = choose_restore([held(0, 20), held(1, 21), *disk], size(2))

    assert choice.step == 10
    assert "11 steps older than the newest copy (step 21): memory lacks rank 0 at step 21" in choice.reason


def test_the_reason_says_that_all_memory_is_lost() -> None:
    remote = [held(rank, 10, tier=Tier.REMOTE) for rank in range(2)]

    assert choose_restore(remote, size(2)).reason == (
        "step 10 is the latest step that all 2 ranks can restore: all 2 from remote storage; not older: "
        "no rank's memory is left"
    )


def test_own_memory_on_another_machine_is_copied_too() -> None:
    choice = choose_restore([held(0, 5), held(1, 5, machine="m9")], size(2))

    assert [(copy.ranks.first, copy.tier, copy.machine) for copy in singles(choice.copies)] == [(1, Tier.OWN, "m9")]
    assert "1 from memory of (m9)" not in choice.reason
    assert "1 from memory elsewhere (m9)" in choice.reason


def test_a_rollback_takes_exactly_the_requested_step() -> None:
    copies = [held(rank, step) for rank in range(2) for step in (19, 20)]

    choice = choose_restore(copies, size(2), at=19)

    assert choice.step == 19
    assert choice.reason.startswith("step 19 was requested, and all 2 ranks can restore: ")
    assert choose_restore(copies, size(2), at=0).step == 0


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (18, "step 18 cannot be restored by all 2 ranks: no rank has it; there are steps 20, 19"),
        (21, "step 21 cannot be restored by all 2 ranks: rank 1 lacks it; there are steps 20, 19"),
        (-3, "step -3"),
    ],
)
def test_a_rollback_to_a_missing_step_names_those_that_exist(at: int, said: str) -> None:
    copies = [*(held(rank, step) for rank in range(2) for step in (19, 20)), held(0, 21)]

    with pytest.raises(CheckpointError) as raised:
        choose_restore(copies, size(2), at=at)

    assert said in str(raised.value)


def test_a_rollback_without_any_step_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no rank has it; no step can be restored by all of them"):
        choose_restore([], size(2), at=3)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Topology, list[str], list[StateCopies]]:
    per_machine, machines = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    topology = Topology.of(machines, per_machine)
    names = [f"m{index}" for index in range(machines)]
    copy = st.builds(
        held,
        st.integers(0, topology.world_size - 1),
        st.integers(0, 6),
        st.booleans(),
        tier=st.sampled_from(Tier),
        machine=st.sampled_from([*names, "elsewhere"]),
    )
    return topology, names, draw(st.lists(copy, max_size=60))


@given(situations(), st.randoms())
def test_the_chosen_step_is_the_newest_that_all_ranks_can_restore(
    situation: tuple[Topology, list[str], list[StateCopies]], random: Random
) -> None:
    topology, names, copies = situation
    valid = {(one.ranks.first, one.completed_steps) for one in copies if one.valid}

    def common(step: int) -> bool:
        return all((rank, step) in valid for rank in range(topology.world_size))

    choice = choose_restore(copies, Assignment(topology, names))

    if choice.step > 0:
        assert common(choice.step)
    assert not any(common(step) for step in range(max(choice.step, 0) + 1, 7))
    assert (choice.step == NOTHING_HELD) == (not copies)
    shuffled = list(copies)
    random.shuffle(shuffled)
    assert choose_restore(shuffled, Assignment(topology, names)) == choice, "the order of the copies does not matter"


@given(situations())
def test_each_rank_restores_its_own_slot_or_a_valid_copy_of_the_first_tier(
    situation: tuple[Topology, list[str], list[StateCopies]],
) -> None:
    topology, names, copies = situation
    choice = choose_restore(copies, Assignment(topology, names))
    brought = {copy.ranks.first: copy for copy in singles(choice.copies)}
    assert len(brought) == count_of(choice.copies)
    if choice.step <= 0:
        assert not brought
        return
    for rank in range(topology.world_size):
        home = names[topology.machine(rank)]
        there = [one for one in copies if one.valid and (one.ranks.first, one.completed_steps) == (rank, choice.step)]
        in_place = any(one.tier == Tier.OWN and one.machine == home for one in there)
        assert in_place == (rank not in brought)
        if copy := brought.get(rank):
            assert copy.completed_steps == choice.step
            assert (copy.tier, copy.machine) in {(one.tier, one.machine) for one in there}
            depth = {Tier.OWN: 0, Tier.BACKUP: 0, Tier.DISK: 1, Tier.REMOTE: 2}
            assert depth[copy.tier] == min(depth[one.tier] for one in there)


def test_only_own_slots_known_by_their_headers_are_to_be_verified() -> None:
    own = [held(0, 20, verified=False), held(0, 19, verified=False), held(1, 20), held(2, 20, verified=False)]
    brought = [held(3, 20, tier=Tier.BACKUP, machine="m0", verified=False)]

    choice = choose_restore([*own, *brought], size(4))

    assert choice.step == 20
    assert [(copy.ranks.first, copy.tier) for copy in singles(choice.copies)] == [(3, Tier.BACKUP)], (
        "the backup is verified when it arrives, so it is not listed below"
    )
    assert [(copy.ranks.first, copy.completed_steps, copy.machine) for copy in singles(choice.unverified)] == [
        (0, 20, "m0"),
        (2, 20, "m2"),
    ]


@given(situations(), st.data())
def test_an_own_slot_is_restored_only_once_it_is_verified(
    situation: tuple[Topology, list[str], list[StateCopies]], data: st.DataObject
) -> None:
    topology, names, copies = situation
    unread = data.draw(st.sets(st.tuples(st.integers(0, topology.world_size - 1), st.integers(0, 6))))
    copies = [
        one.model_copy(update={"verified": (one.ranks.first, one.completed_steps) not in unread}) for one in copies
    ]

    choice = choose_restore(copies, Assignment(topology, names))

    in_place = set(range(topology.world_size)) - {copy.ranks.first for copy in singles(choice.copies)}
    expected = {rank for rank in in_place if (rank, choice.step) in unread} if choice.step > 0 else set()
    assert {copy.ranks.first for copy in singles(choice.unverified)} == expected
    assert (
        choice.step
        == choose_restore(
            [one.model_copy(update={"verified": True}) for one in copies], Assignment(topology, names)
        ).step
    )


def test_unlisted_storage_is_not_a_damaged_copy() -> None:
    unknown = held(0, -1, valid=False, tier=Tier.REMOTE).model_copy(update={"reason": "s3://b cannot be listed: no"})

    said = choose_restore([held(0, 20), held(1, 20), unknown], size(2)).reason

    assert said.endswith("; s3://b cannot be listed: no")
    assert "rank 0 on" not in said


TOPOLOGY = Topology.of(machines=4, ranks_per_machine=2, tp=2, pp=2)
"""A job with the data-parallel groups 0 2, 1 3, 4 6 and 5 7."""


def files(tier: Tier, digests: str, topology: Topology = TOPOLOGY) -> list[StateCopies]:
    """Return the copies of all ranks as a machine lists them, with a digest for each rank; a space: it has none."""
    wire = {
        Tier.REMOTE: pb.HeldCheckpoint.REMOTE,
        Tier.DISK: pb.HeldCheckpoint.DISK,
        Tier.BACKUP: pb.HeldCheckpoint.BACKUP,
    }
    listed = [
        pb.HeldCheckpoint(rank=rank, completed_steps=20, valid=True, tier=wire[tier], digest=digest.strip())
        for rank, digest in enumerate(digests)
    ]
    assignment = Assignment(topology, [f"m{index}" for index in range(topology.machines)])
    return held_of({"m0": listed}, assignment)[0]


def test_the_first_rank_of_each_group_reads_remote_storage_for_it() -> None:
    found = readers(files(Tier.REMOTE, "ababcdcd"), TOPOLOGY)

    assert found == {2: 0, 3: 1, 6: 4, 7: 5}


def test_ranks_with_different_or_unknown_tensors_read_for_themselves() -> None:
    found = readers(files(Tier.REMOTE, "abA c c "), TOPOLOGY)

    assert found == {6: 4}


def test_a_disk_is_read_by_its_own_machine_unless_it_is_shared() -> None:
    assert readers(files(Tier.DISK, "aaaaaaaa"), TOPOLOGY) == {}
    assert readers(files(Tier.DISK, "aaaaaaaa"), TOPOLOGY, disk_shared=True) == {2: 0, 3: 1, 6: 4, 7: 5}
    assert readers(files(Tier.BACKUP, "aaaaaaaa"), TOPOLOGY, disk_shared=True) == {}


@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]),
    st.lists(st.sampled_from("ab"), min_size=16, max_size=16),
    st.sets(st.integers(0, 15)),
)
def test_a_reader_reads_for_itself_the_same_bytes_in_the_same_group(
    sizes: tuple[int, int], shards: list[str], ranks: set[int]
) -> None:
    topology = Topology.of(machines=8, ranks_per_machine=2, tp=sizes[0], pp=sizes[1])
    wanted = [entry.among(Ranks.of(ranks)) for entry in files(Tier.REMOTE, "".join(shards), topology)]

    found = readers(wanted, topology)

    for rank, reader in found.items():
        assert reader not in found
        assert {rank, reader} <= ranks
        assert reader in topology.group(rank, "dp")
        assert shards[rank] == shards[reader]
    of_first = [topology.group(rank, "dp") for rank in ranks if shards[rank] == shards[topology.group(rank, "dp")[0]]]
    direct = [topology.group(rank, "dp") for rank in ranks if rank not in found]
    assert all(direct.count(group) - _others(group, ranks, shards) == 1 for group in of_first), (
        "the tensors of the first rank of a group are read once for all ranks that have them"
    )


def _others(group: Sequence[int], ranks: set[int], shards: list[str]) -> int:
    return sum(rank in ranks and shards[rank] != shards[group[0]] for rank in group)
