"""One rank of a data-parallel group reads what is equal for all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.choose_restore import readers
from everstep.model.state_copy import CopyToRestore, Tier
from everstep.model.topology import Topology

TOPOLOGY = Topology.of(machines=4, ranks_per_machine=2, tp=2, pp=2)
"""Data-parallel groups: 0 2, 1 3, 4 6, 5 7."""


def copies(tier: Tier, ranks: range = range(8)) -> list[CopyToRestore]:
    return [CopyToRestore(rank=rank, completed_steps=20, tier=tier, machine="m0") for rank in ranks]


def digests(*shards: str) -> dict[int, str]:
    return dict(enumerate(shards))


def test_the_first_rank_of_each_group_reads_remote_storage_for_it() -> None:
    found = readers(copies(Tier.REMOTE), digests("a", "b", "a", "b", "c", "d", "c", "d"), TOPOLOGY)

    assert found == {2: 0, 3: 1, 6: 4, 7: 5}


def test_ranks_with_other_tensors_or_none_known_read_for_themselves() -> None:
    found = readers(copies(Tier.REMOTE), digests("a", "b", "A", "", "c", "", "c", ""), TOPOLOGY)

    assert found == {6: 4}


def test_a_disk_is_read_by_its_own_machine_unless_it_is_shared() -> None:
    same = digests(*"aaaaaaaa")

    assert readers(copies(Tier.DISK), same, TOPOLOGY) == {}
    assert readers(copies(Tier.DISK), same, TOPOLOGY, disk_shared=True) == {2: 0, 3: 1, 6: 4, 7: 5}
    assert readers(copies(Tier.BACKUP), same, TOPOLOGY, disk_shared=True) == {}


@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)]),
    st.lists(st.sampled_from("ab"), min_size=16, max_size=16),
    st.sets(st.integers(0, 15)),
)
def test_a_reader_reads_for_itself_the_same_bytes_in_the_same_group(
    sizes: tuple[int, int], shards: list[str], ranks: set[int]
) -> None:
    topology = Topology.of(machines=8, ranks_per_machine=2, tp=sizes[0], pp=sizes[1])
    wanted = [one for one in copies(Tier.REMOTE, range(16)) if one.rank in ranks]

    found = readers(wanted, digests(*shards), topology)

    for rank, reader in found.items():
        assert reader not in found
        assert {rank, reader} <= ranks
        assert reader in topology.group(rank, "dp")
        assert shards[rank] == shards[reader]
    direct = [(topology.group(rank, "dp"), shards[rank]) for rank in ranks if rank not in found]
    assert len(direct) == len(set(direct)), "every shard is read once for its group"
