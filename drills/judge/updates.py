"""Whether an update of the code became what it deserves, and each step ran under the version that the record says.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from drills.observe.step_records import Records
from drills.spec.request import DrillRequest
from drills.spec.updates import expected_update
from everstep.model.incident import IncidentReport
from everstep.model.version import JobVersion

SHOWN = 5
"""Steps that are named."""


def update_right(
    request: DrillRequest, versions: Sequence[JobVersion], records: Records, reports: Sequence[IncidentReport]
) -> list[str]:
    """What is wrong with an update; nothing for other faults.

    Args:
        request: The drill.
        versions: Of the job, as it knows them in the end.
        records: Its steps.
        reports: Of its incidents.
    """
    expected = expected_update(request)
    if expected is None:
        return []
    found = [f"{one.name} ran {len(one.ranges)} times" for one in versions[1:] if len(one.ranges) > 1]
    became = tuple(one.status for one in versions)
    if became != expected.versions:
        told = ", ".join(f"v{one.number} {one.status} ({one.why[:100]})" for one in versions)
        found.append(f"the versions are {told}, and should be {', '.join(expected.versions)}")
    if expected.resolution and (not reports or reports[-1].resolution != expected.resolution):
        said = reports[-1].resolution if reports else "nothing"
        found.append(f"the last incident's resolution is {said}, and should be {expected.resolution}")
    if expected.resolution == "rollback":
        # Who asked for it is what a person needs first.
        suspect = [one for one in versions if one.number > 1]
        found += [f"nobody says who asked for {one.name}: {one.why}" for one in suspect if "by drill" not in one.why]
        texts = " ".join(text for report in reports for text in (report.headline, *report.stages))
        found += [] if "v2, asked for by drill" in texts else ["the incident does not name the suspect"]
    return found + steps_under_their_versions(versions, records)


def steps_under_their_versions(versions: Sequence[JobVersion], records: Records) -> list[str]:
    """Steps whose record names another version than the job's book says.

    A generation runs the version that came last before it; what counts of a step is its last report.

    Args:
        versions: Of the job.
        records: Its steps.
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
