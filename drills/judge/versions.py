"""Checks that each step ran under the recorded version of the code. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drills.observe.step_records import Records
from everstep.model.version import JobVersion

SHOWN = 5
"""The largest number of steps that one problem names."""


def steps_under_their_versions(versions: Sequence[JobVersion], records: Records) -> list[str]:
    """Return problems with the versions in step records, compared with the job's own list of versions.

    A generation runs the last version that was applied before it. Only the last report of a step must lie within the
    steps of its version.

    Args:
        versions: Versions of the job, with the ranges of steps in which they ran.
        records: Step records of the job.
    """
    applied = sorted((generation, v.number, begin, end) for v in versions for generation, begin, end in v.ranges)
    wrong: dict[str, set[int]] = {}
    for reported in records.of.values():
        last = {record.step: record for record in reported}
        for record in reported:
            earlier = [entry for entry in applied if entry[0] <= record.generation]
            if not earlier:
                wrong.setdefault(f"generation {record.generation} ran no version of the list", set()).add(record.step)
                continue
            _, number, begin, end = earlier[-1]
            if record.version != number:
                text = f"v{record.version} is recorded, and v{number} ran in generation {record.generation}"
                wrong.setdefault(text, set()).add(record.step)
            elif last[record.step] is record and not (begin <= record.step and (end < 0 or record.step < end)):
                wrong.setdefault(f"v{number} ran from {begin} to {end} only", set()).add(record.step)
    return [f"{text}: step {', '.join(map(str, sorted(steps)[:SHOWN]))}" for text, steps in wrong.items()]
