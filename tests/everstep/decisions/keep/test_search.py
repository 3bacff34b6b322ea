"""The evidence after disks and remote storage were asked."""

from __future__ import annotations

from everstep.decisions.keep.search import merged
from everstep.model.evidence import Evidence
from everstep.model.state_copy import StateCopy, Tier


def test_what_is_found_is_added_once() -> None:
    known = StateCopy(rank=0, machine="m0", completed_steps=20, tier=Tier.DISK, valid=False, reason="cut off")
    again = known.model_copy(update={"valid": True})
    new = StateCopy(rank=0, machine="m0", completed_steps=20, tier=Tier.REMOTE)

    found = merged(Evidence(generation=3, held=[known]), Evidence(generation=0, held=[again, new], disk_shared=True))

    assert found.held == [known, new]
    assert (found.generation, found.disk_shared) == (3, True)
