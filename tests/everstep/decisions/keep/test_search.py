"""The evidence after a search for copies on disks and on remote storage."""

from __future__ import annotations

from everstep.decisions.keep.search import merged, unanswered
from everstep.model.evidence import Evidence, Unlisted
from everstep.model.state_copy import StateCopies, Tier

MACHINES = ("m0", "m1", "m2", "m3")


def test_each_copy_is_added_once() -> None:
    known = StateCopies.one(rank=0, machine="m0", completed_steps=20, tier=Tier.DISK, valid=False, reason="cut off")
    again = known.model_copy(update={"valid": True})
    new = StateCopies.one(rank=0, machine="m0", completed_steps=20, tier=Tier.REMOTE)

    evidence = merged(Evidence(generation=3, held=[known]), Evidence(generation=0, held=[again, new], disk_shared=True))

    assert evidence.held == [known, new]
    assert (evidence.generation, evidence.disk_shared) == (3, True)


def test_a_location_listed_once_counts_as_listed() -> None:
    stopped = Evidence(
        generation=1, emptied=["m3"], unlisted=[Unlisted(tier=Tier.DISK, machines=["m1"], reason="hangs")]
    )
    silent = Unlisted(tier=Tier.DISK, machines=["m0", "m1", "m3"], reason="no agent answers")
    remote = Unlisted(tier=Tier.REMOTE, reason="denied")

    first = merged(stopped, Evidence(generation=0, unlisted=[silent, remote]))
    assert first.searched
    assert first.unlisted == [silent.model_copy(update={"machines": ["m1", "m3"]}), remote]

    second = merged(first, Evidence(generation=0, unlisted=[silent.model_copy(update={"machines": ["m3"]})]))
    assert [location.machines for location in second.unlisted] == [["m3"]], (
        "remote storage was listed at the second try"
    )

    third = unanswered(second, MACHINES, "no worker")
    assert third.unlisted == [Unlisted(tier=Tier.DISK, machines=["m3"], reason="no worker")]
    asked = unanswered(stopped, MACHINES, "no worker")
    assert [location.tier for location in asked.unlisted] == [Tier.DISK, Tier.REMOTE]
