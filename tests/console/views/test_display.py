"""The output of commands for a pipe and for a script."""

from __future__ import annotations

import io
import json

import pytest

from console.views.display import Ending, Json, Lines, Tick
from controlplane import text
from controlplane.problems import ProblemEvent
from controlplane.queries.events import IncidentEvent
from everstep.model.job_state import IncidentSummary


def tick(**changes: object) -> Tick:
    given: dict[str, object] = {
        "job": "gpt",
        "status": "running",
        "generation": 2,
        "step": 143,
        "loss": 2.10342,
        "steps_per_s": 8.127,
        "tokens_per_s": 12_345.0,
        "ettr": 0.9721,
        "ranks_alive": 8,
        "ranks": 8,
        "incidents": 0,
    }
    return Tick(**(given | changes))  # type: ignore[arg-type]


RECOVERED = IncidentEvent(
    "recovered",
    IncidentSummary(
        id="incident/gpt/0001", number=1, headline="Recovered in 0.4 s", resolution="reattempt", seconds=0.4
    ),
)


def test_a_line_says_what_is_the_matter_and_nothing_else() -> None:
    """The line names problems only if there are any."""
    assert tick().line == "step 143  loss 2.1034  8.13 step/s  12.3k token/s  ETTR 97.2 %  generation 2"
    amiss = tick(ranks_alive=7, status="recovering", incidents=1, silent=("m2",)).line
    assert amiss.endswith("incidents 1  7 of 8 ranks  recovering  no answer from m2")
    assert tick(step=None, status="starting", ranks_alive=0).line == "starting  0 of 8 ranks  generation 2"


def test_lines_come_once_a_second_at_most_and_only_when_the_job_moves() -> None:
    out = io.StringIO()
    lines = Lines(out)
    for step in range(50):
        lines.tick(tick(step=step))
    assert out.getvalue().count("\n") == 1
    lines.incident(RECOVERED, ["stop 0.1 s"])
    assert "incident 0001  Recovered in 0.4 s\n" in out.getvalue()  # an incident is shown at once


def test_every_json_line_is_an_object_with_event_and_time() -> None:
    out = io.StringIO()
    shown = Json(out)
    shown.note("hello")
    shown.started("gpt", {"world_size": 8}, ["not for scripts"])
    shown.tick(tick())
    shown.tick(tick(step=144))
    shown.incident(RECOVERED, [])
    shown.ended(Ending("finished", "gpt finished", (), 0, {"steps": 300}))
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["event"] for row in rows] == ["note", "started", "progress", "incident", "ended"]
    assert all(row["time"] > 0 for row in rows)
    assert (rows[3]["kind"], rows[3]["seconds"], rows[4]["facts"]["steps"]) == ("recovered", 0.4, 300)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (950, "950"), (12_345, "12.3k"), (4_560_000, "4.56M"), (2e9, "2G"), (3e13, "30T")],
)
def test_counts_are_short(value: float | None, shown: str) -> None:
    assert text.count(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.421, "0.42 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7_450, "2 h 4 min"), (276_000, "3 d 4 h"), (None, "-")],
)
def test_durations_have_two_units_at_most(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_an_incident_that_is_over_when_first_seen_gets_one_line() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.incident(IncidentEvent("opened", RECOVERED.incident), [])
    lines.incident(RECOVERED, [])
    assert out.getvalue().count("incident 0001") == 1


def test_a_narrow_terminal_still_says_what_is_amiss() -> None:
    amiss = tick(ranks_alive=7, status="recovering", incidents=1)
    assert amiss.within(200) == amiss.line
    assert amiss.within(70) == "step 143  loss 2.1034  8.13 step/s  7 of 8 ranks  recovering"


def test_a_problem_with_checkpoints_is_a_line_and_an_object() -> None:
    event = ProblemEvent("began", "disk", ("m0",), "/mnt/x is full")
    out = io.StringIO()
    Lines(out).problem(event)
    assert out.getvalue().endswith("  checkpoints: disk on m0: /mnt/x is full\n")
    out = io.StringIO()
    Json(out).problem(event)
    shown = json.loads(out.getvalue())
    assert (shown["event"], shown["kind"], shown["what"], shown["machines"]) == ("problem", "began", "disk", ["m0"])
