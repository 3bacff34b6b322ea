"""The course of a played case, for people."""

from __future__ import annotations

from collections.abc import Sequence

from console.terminal import aligned
from drills.cases.case import Case
from drills.cases.play import Course, Difference

INDENT = " " * 4


def played_lines(file: str, case: Case, course: Course, differs: Sequence[Difference]) -> list[str]:
    """The incidents of a course with their stages, the result, and what is not as expected."""
    lines = [f"{file}: {case.title}"]
    for number, chapter in enumerate(course.story, 1):
        lines += ["", f"{INDENT}incident {number}: {chapter.headline}"]
        rows = [(stage.name, f"{stage.seconds:.1f} s", stage.found) for stage in chapter.stages]
        lines += aligned(rows, INDENT * 2)
    evicted = ", ".join(f"{machine} ({rule})" for machine, rule in course.evicted.items())
    result = [
        ("evicted", evicted or "no machine"),
        ("parked", course.parked or "no"),
        ("rungs", ", ".join(course.rungs) or "none"),
        ("trains again", "no" if course.seconds is None else f"after {course.seconds:.1f} s"),
    ]
    lines += ["", *aligned(result, INDENT)]
    if not differs:
        return [*lines, f"{INDENT}as expected", ""]
    rows = [(one.part, f"expected {one.expected}", f"but {one.actual}") for one in differs]
    return [*lines, f"{INDENT}not as expected", *aligned(rows, INDENT * 2), ""]
