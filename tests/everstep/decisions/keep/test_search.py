"""Disks and remote storage are asked when memory does not do, and only then."""

from __future__ import annotations

import pytest

from everstep.decisions.keep.choose_restore import Restore
from everstep.decisions.keep.search import look_further, merged
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence
from everstep.model.state_copy import CopyToRestore, StateCopy, Tier

REMOTE = CheckpointPolicy(remote_url="file:///mnt/runs")
LOCAL = CheckpointPolicy()


def restore(step: int, *tiers: Tier) -> Restore:
    return Restore(
        step, "", tuple(CopyToRestore(rank=0, completed_steps=step, tier=tier, machine="m0") for tier in tiers)
    )


EMPTIED = Evidence(generation=1, emptied=["m2"])
WHOLE = Evidence(generation=1)


@pytest.mark.parametrize(
    ("chosen", "evidence", "policy", "expected"),
    [
        (restore(20), EMPTIED, REMOTE, False),
        (restore(20, Tier.BACKUP), EMPTIED, REMOTE, False),
        (restore(20, Tier.BACKUP, Tier.DISK), EMPTIED, LOCAL, True),
        (restore(20, Tier.DISK), WHOLE, LOCAL, False),
        (restore(20, Tier.DISK), WHOLE, REMOTE, True),
        (restore(0), WHOLE, REMOTE, True),
        (restore(0), EMPTIED, LOCAL, True),
        (restore(0), WHOLE, LOCAL, True),
        (restore(-1), WHOLE, LOCAL, False),
        (restore(0), Evidence(generation=1, emptied=["m2"], unreachable=["m1"]), REMOTE, False),
        (restore(0), Evidence(generation=1, problem="no answer"), REMOTE, False),
    ],
)
def test_who_has_not_been_asked_is_asked(
    chosen: Restore, evidence: Evidence, policy: CheckpointPolicy, expected: bool
) -> None:
    assert look_further(chosen, evidence, policy) is expected


def test_what_is_found_is_added_once() -> None:
    known = StateCopy(rank=0, machine="m0", completed_steps=20, tier=Tier.DISK, valid=False, reason="cut off")
    again = known.model_copy(update={"valid": True})
    new = StateCopy(rank=0, machine="m0", completed_steps=20, tier=Tier.REMOTE)

    found = merged(Evidence(generation=3, held=[known]), Evidence(generation=0, held=[again, new], disk_shared=True))

    assert found.held == [known, new]
    assert (found.generation, found.disk_shared) == (3, True)
