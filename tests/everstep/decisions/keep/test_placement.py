"""The placement of backups: its invariants for all small sizes, and examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.placement import Placement, place_backups, survives
from everstep.errors import TopologyError
from everstep.model.topology import Axis, Topology

ORDERS: tuple[tuple[Axis, ...], ...] = (("pp", "dp", "tp"), ("dp", "pp", "tp"))


def topologies(most_machines: int, most_ranks: int) -> Iterator[Topology]:
    """Yield every topology up to these sizes, with both orders of the axes."""
    for machines in range(1, most_machines + 1):
        for ranks in range(1, most_ranks + 1):
            world = machines * ranks
            for tp in divisors(world):
                for pp in divisors(world // tp):
                    for order in ORDERS:
                        yield Topology.of(machines, ranks, tp, pp, order)


def divisors(number: int) -> list[int]:
    return [by for by in range(1, number + 1) if number % by == 0]


def machine_targets(topology: Topology, placement: Placement) -> list[int]:
    """Return for each machine the machine that holds its backups."""
    found: list[int] = []
    for machine in range(topology.machines):
        (target,) = {
            topology.machine(peer) for rank in topology.ranks(machine) if (peer := placement.peers[rank]) is not None
        }
        found.append(target)
    return found


def machines_of_groups(topology: Topology) -> dict[str, list[frozenset[int]]]:
    """Return for each group, by kind, the machines that have ranks of the group."""
    found: dict[str, dict[object, set[int]]] = {axis: {} for axis in topology.axes}
    for rank in range(topology.world_size):
        places = topology.coordinate(rank).places
        for axis in topology.axes:
            others = tuple(place for place in places if place[0] != axis)
            found[axis].setdefault(others, set()).add(topology.machine(rank))
    return {axis: [frozenset(machines) for machines in groups.values()] for axis, groups in found.items()}


def broken(groups: dict[str, list[frozenset[int]]], targets: Sequence[int]) -> dict[str, int]:
    """Return for each kind the number of groups whose machines have an owner and its peer, without kinds of 0."""
    counts = {
        axis: sum(any(targets[machine] in lost for machine in lost) for lost in every) for axis, every in groups.items()
    }
    return {axis: count for axis, count in counts.items() if count}


def test_every_small_size() -> None:
    """Backups are evenly spread over other machines. Any lost group is survived unless the placement names its kind."""
    for topology in topologies(12, 8):
        placement = place_backups(topology)
        if topology.machines == 1:
            assert placement.peers == (None,) * topology.world_size
            continue
        peers = [peer for peer in placement.peers if peer is not None]
        targets = machine_targets(topology, placement)
        assert sorted(peers) == list(range(topology.world_size)), f"{topology}: not a permutation"
        assert all(target != machine for machine, target in enumerate(targets)), f"{topology}: not on another machine"
        assert placement.involution == all(peers[peers[rank]] == rank for rank in range(topology.world_size))
        assert placement.shared == tuple(broken(machines_of_groups(topology), targets)), f"{topology}: {placement}"


def test_no_permutation_of_few_machines_is_better() -> None:
    """A search of all permutations finds none that breaks fewer groups."""
    for topology in topologies(5, 6):
        if topology.machines == 1:
            continue
        groups = machines_of_groups(topology)
        every = [to for to in permutations(range(topology.machines)) if all(m != at for at, m in enumerate(to))]
        best = min(sum(broken(groups, to).values()) for to in every)
        targets = machine_targets(topology, place_backups(topology))
        assert sum(broken(groups, targets).values()) == best, str(topology)


def test_figure_9_of_the_paper() -> None:
    """TP 2, PP 4, DP 2, two ranks on a machine: ranks 8, 9 exchange backups with 2, 3 (ByteRobust, section 7)."""
    topology = Topology.of(machines=8, ranks_per_machine=2, tp=2, pp=4, order=("dp", "pp", "tp"))
    placement = place_backups(topology)

    assert (placement.peers[8], placement.peers[9]) == (2, 3)
    assert (placement.peers[2], placement.peers[3]) == (8, 9)
    assert placement.involution
    assert placement.shared == ()
    for rank, peer in enumerate(placement.peers):
        at = topology.coordinate(rank)
        assert peer == topology.rank_at(tp=at.tp, pp=at.pp ^ 1, dp=at.dp ^ 1)


def test_one_kind_of_parallelism_uses_the_neighbour_and_the_reason_has_the_cost() -> None:
    pairs = place_backups(Topology.of(8, 2))
    ring = place_backups(Topology.of(7, 1))

    assert pairs.peers == (2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
    assert pairs.involution
    assert ring.peers == (1, 2, 3, 4, 5, 6, 0)
    assert pairs.shared == ring.shared == ("dp",)
    assert pairs.reason == (
        "all 8 machines are in one dp group: backups go to the neighbouring machine; "
        "losing both costs the steps since the last disk checkpoint"
    )


def test_one_machine_has_no_peer() -> None:
    placement = place_backups(Topology.of(1, 4, 2, 2))

    assert placement.peers == (None,) * 4
    assert "one machine only" in placement.reason
    assert not survives(Topology.of(1, 4, 2, 2), placement, {0})


def test_the_reason_counts_the_groups_that_lose_both_copies() -> None:
    placement = place_backups(Topology.of(9, 2, 3, 1))

    assert placement.shared == ("dp",)
    assert placement.reason == (
        "losing all machines of any of the 3 dp groups takes owner and peer together and costs the steps since the "
        "last disk checkpoint"
    )


@pytest.mark.parametrize("shape", [(4, 2, 2, 2), (8, 8, 8, 4), (6, 1, 1, 2), (15, 1, 1, 3), (160, 8, 8, 8)])
def test_losing_all_machines_of_a_group_leaves_owner_or_peer_of_every_rank(shape: tuple[int, int, int, int]) -> None:
    topology = Topology.of(*shape)
    placement = place_backups(topology)

    assert placement.shared == ()
    assert "any one group" in placement.reason
    groups = machines_of_groups(topology)
    assert all(survives(topology, placement, lost) for kind in topology.kinds for lost in set(groups[kind]))
    assert not survives(topology, placement, set(range(topology.machines)))


def test_owner_and_peer_lost_together_do_not_survive() -> None:
    topology = Topology.of(4, 2, 2, 2)
    placement = place_backups(topology)

    assert placement.peers[0] == 6
    assert not survives(topology, placement, {0, 3})
    assert survives(topology, placement, {0, 1})


def test_the_peer_is_in_another_failure_domain_if_groups_allow_it() -> None:
    topology = Topology.of(8, 2, 2, 4, ("dp", "pp", "tp"))
    domains = ["s0", "s1", "s1", "s0", "s1", "s0", "s0", "s1"]  # the peers of figure 9 would share a domain
    placement = place_backups(topology, domains)
    targets = machine_targets(topology, placement)

    assert all(domains[machine] != domains[target] for machine, target in enumerate(targets))
    assert (placement.shared, placement.domains) == ((), ())
    assert "any one failure domain" in placement.reason


def test_groups_take_precedence_over_failure_domains() -> None:
    topology = Topology.of(4, 2, 2, 2)
    placement = place_backups(topology, ["rack", "other", "other", "rack"])

    assert placement.peers[0] == 6, "rank 6 is on the only machine outside the groups of rank 0"
    assert placement.shared == ()
    assert placement.domains == ("other", "rack")
    assert "failure domain other or rack" in placement.reason


def test_unknown_failure_domains_are_no_obstacle() -> None:
    assert place_backups(Topology.of(4, 2, 2, 2), [""] * 4) == place_backups(Topology.of(4, 2, 2, 2))


def test_failure_domains_for_some_machines_only_are_refused() -> None:
    with pytest.raises(TopologyError, match="2 failure domains are named for 4 machines"):
        place_backups(Topology.of(4, 1), ["a", "b"])


@given(st.data())
def test_a_lost_failure_domain_is_survived_unless_the_placement_names_it(data: st.DataObject) -> None:
    machines, ranks = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 4))
    tp = data.draw(st.sampled_from(divisors(ranks * machines)))
    pp = data.draw(st.sampled_from(divisors(ranks * machines // tp)))
    topology = Topology.of(machines, ranks, tp, pp, data.draw(st.sampled_from(ORDERS)))
    domains = data.draw(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=machines, max_size=machines))

    placement = place_backups(topology, domains)
    targets = machine_targets(topology, placement)

    assert placement.shared == tuple(broken(machines_of_groups(topology), targets))
    lost = {
        domains[machine] for machine, to in enumerate(targets) if domains[machine] and domains[machine] == domains[to]
    }
    assert placement.domains == tuple(sorted(lost))
    # Naming domains never costs a parallel group.
    assert bool(placement.shared) == bool(place_backups(topology).shared)
    for name in {*domains} - {"", *placement.domains}:
        assert survives(topology, placement, {m for m, domain in enumerate(domains) if domain == name})


MESHES = [
    "8,8,pp=2,dp_replicate=2,dp_shard=4,tp=4",
    "16,4,pp=4,dp_replicate=2,dp_shard=2,cp=2,tp=2",
    "8,4,pp=2,dp_shard=8,tp=2,ep=4:dp_shard",
    "16,2,dp_replicate=4,dp_shard=4,tp=2,ep=4:dp_shard+tp",
]


@pytest.mark.parametrize("mesh", MESHES)
def test_any_group_of_a_large_enough_mesh_may_be_lost(mesh: str) -> None:
    topology = Topology.parse(mesh)
    placement = place_backups(topology)

    assert placement.shared == (), placement.reason
    for kind in topology.kinds:
        for group in topology.groups(kind):
            assert survives(topology, placement, {topology.machine(rank) for rank in group}), kind


def test_the_reason_names_the_axis_that_no_placement_can_protect() -> None:
    placement = place_backups(Topology.parse("4,2,dp_shard=8"))

    assert placement.shared == ("dp_shard",)
    assert "all 4 machines are in one dp_shard group" in placement.reason
    hybrid = place_backups(Topology.parse("4,2,dp_replicate=2,dp_shard=4"))
    assert hybrid.shared == (), "backups go to the other half of the neighbouring replica"
