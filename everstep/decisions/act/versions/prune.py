"""The versions that a store need not keep any longer; pure.

The store keeps a job's last versions, versions that may still be needed, and young versions, since they may be about
to be used. Code goes once no record names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

KEPT = 20
"""Versions of each job that are kept, the newest ones."""
YOUNG_S = 24 * 3600.0
"""Nothing that was written within this time is removed, seconds."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A record in the store."""

    job: str
    id: str
    """The id of the :class:`everstep.model.version.CodeVersion`."""
    code: str
    """Digest of its snapshot; empty: it has none."""
    age_s: float
    """Since it was written last."""


@dataclass(frozen=True, slots=True)
class Prunable:
    """The versions and the code that may be deleted."""

    versions: list[StoredVersion]
    code: list[str]
    """Digests."""


def prunable(
    versions: Iterable[StoredVersion], code: Mapping[str, float], *, job: str, needed: Collection[str]
) -> Prunable:
    """Return the versions and the code that a store need not keep.

    Args:
        versions: All records in it, of all jobs.
        code: The digests of all snapshots in it, with the seconds since each was written.
        job: The job whose versions are pruned: the needs of other jobs are not known here.
        needed: Ids of versions that the job runs, is to run or may go back to, or that a checkpoint or incident names.
    """
    known = list(versions)
    own = sorted((one for one in known if one.job == job), key=lambda one: (one.age_s, one.id))
    going = [one for one in own[KEPT:] if one.id not in needed and one.age_s > YOUNG_S]
    gone = {(version.job, version.id) for version in going}
    named = {one.code for one in known if (one.job, one.id) not in gone}
    return Prunable(going, sorted(digest for digest, age_s in code.items() if digest not in named and age_s > YOUNG_S))
