"""Finds the code versions that a store may delete.

The store keeps the last versions of a job, versions that may still be needed, and young versions, which may be used
soon. A snapshot of code may be deleted once no kept version names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

KEPT = 20
"""The number of the newest versions of each job that are kept."""
YOUNG_S = 24 * 3600.0
"""Versions and code that were written within this time, seconds, are kept."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The record of a version in the store."""

    job: str
    id: str
    """The id of the :class:`everstep.model.version.CodeVersion`."""
    code: str
    """The digest of its snapshot; empty: it has no snapshot."""
    age_s: float
    """The time since the record was last written, seconds."""


@dataclass(frozen=True, slots=True)
class Prunable:
    """The versions and the code that may be deleted."""

    versions: list[StoredVersion]
    code: list[str]
    """The digests of the snapshots."""


def prunable(
    versions: Iterable[StoredVersion], code: Mapping[str, float], *, job: str, needed: Collection[str]
) -> Prunable:
    """Return the versions of a job, and the code, that a store may delete.

    Args:
        versions: All records in the store, of all jobs.
        code: The digest of each snapshot in the store → seconds since it was written.
        job: The job whose versions are pruned. Versions of other jobs are kept, since these jobs may need them.
        needed: Ids of versions that the job runs, is to run or may go back to, or that a checkpoint or incident names.
    """
    stored = list(versions)
    own = sorted((version for version in stored if version.job == job), key=lambda version: (version.age_s, version.id))
    old = [version for version in own[KEPT:] if version.id not in needed and version.age_s > YOUNG_S]
    deleted = {(version.job, version.id) for version in old}
    named = {version.code for version in stored if (version.job, version.id) not in deleted}
    return Prunable(old, sorted(digest for digest, age_s in code.items() if digest not in named and age_s > YOUNG_S))
