"""Checks that each step ran under the recorded version of the code. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from drills.observe.step_records import Records
from everstep.model.version import JobVersion

SHOWN = 5
"""Number of steps that a problem names."""


def steps_under_their_versions(versions: Sequence[JobVersion], records: Records) -> list[str]:
    """Steps whose record has another version than the job's list of versions.

    A generation runs the last version applied before it; for a step only its last report counts.

    Args:
        versions: Versions of the job.
        records: Step records of the job.
    """
    came = sorted((generation, one.number, begin, end) for one in versions for generation, begin, end in one.ranges)
    wrong: dict[str, set[int]] = {}
    for found in records.of.values():
        last = {record.step: record for record in found}
        for record in found:
            earlier = [one for one in came if one[0] <= record.generation]
            if not earlier:
                wrong.setdefault(f"generation {record.generation} ran no version that is known", set()).add(record.step)
                continue
            _, number, begin, end = earlier[-1]
            if record.version != number:
                text = f"v{record.version} is recorded, and v{number} ran in generation {record.generation}"
                wrong.setdefault(text, set()).add(record.step)
            elif last[record.step] is record and not (begin <= record.step and (end < 0 or record.step < end)):
                wrong.setdefault(f"v{number} ran from {begin} to {end} only", set()).add(record.step)
    return [f"{text}: step {', '.join(map(str, sorted(steps)[:SHOWN]))}" for text, steps in wrong.items()]
