"""The cases: what is broken, and the course of the recovery."""

from __future__ import annotations

from pathlib import Path

from docs.generate.markdown import code, paragraph, table
from drills.cases.case import read_case
from drills.cases.play import Course, play

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "cases"


def courses() -> str:
    """Return all cases with their courses, as they are played now."""
    rows = []
    for path in sorted(FOLDER.glob("*.toml")):
        case = read_case(path)
        rows.append((code(path.stem), case.title, _course(play(case)), case.source))
    intro = paragraph(
        "Each case is a file of `tests/cases`. A test plays it and compares the course with what the case expects.",
        "The durations of tests, restarts and steps are those of the case, so the seconds compare courses only.",
        "[Play a case](../guides/cases.md) explains the format.",
    )
    return f"{intro}\n\n{table(('case', 'what happens', 'course', 'source'), rows)}"


def _course(course: Course) -> str:
    evicted = ", ".join(f"{machine} leaves ({code(rule)})" for machine, rule in course.evicted.items())
    parts = [
        ", ".join(course.rungs) if course.rungs else "no rung is tried",
        evicted or "no machine leaves",
        f"parked by {code(course.parked)}" if course.parked else "",
        "" if course.seconds is None or not course.incidents else f"trains again after {course.seconds:.0f} s",
    ]
    return "; ".join(part for part in parts if part)
