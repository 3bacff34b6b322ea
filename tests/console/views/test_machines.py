"""The tables of everstep machines."""

from __future__ import annotations

from io import StringIO
from typing import Any

from console.terminal import PlainConsole
from console.views.machines import HEALTHY_SHOWN, machine_table, machines_table, measure_lines, odd_lines
from controlplane.queries.machines import InspectionReport, MachineReport, OddMachine
from everstep.model.finding import Finding, Health

FOUND = Finding(
    inspection="gpu",
    reason="gpu-hot",
    item="GPU 3",
    text="it is too hot: 95 C",
    remedy="watch",
    evidence=["95 C", "it slows down at 87 C"],
    since_ns=1_000_000_000,
)


def report(machine: str = "m1", **fields: Any) -> MachineReport:
    faulty: dict[str, Any] = {"verdict": Health.FAULTY, "findings": [FOUND], "now_ns": 61_000_000_000}
    return MachineReport(machine=machine, address="127.0.0.1:1", **(faulty | fields))


def healthy(number: int) -> list[MachineReport]:
    return [report(f"h{index}", verdict=Health.HEALTHY, findings=[]) for index in range(number)]


def shown(*parts: Any) -> str:
    out = StringIO()
    console = PlainConsole(file=out, width=160)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_the_faulty_ones_come_first_and_say_why_since_when_and_what_to_do() -> None:
    text = shown(
        machines_table([*healthy(2), report("m9", verdict=Health.UNKNOWN, findings=[], problem="away"), report()])
    )
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        ("m1", "faulty"),
        ("m9", "unknown"),
        ("h0", "healthy"),
        ("h1", "healthy"),
    ]
    assert "60 s" in text or "1 min" in text or "1m" in text
    assert "GPU 3: it is too hot: 95 C (gpu-hot; owner machine; watch)" in text
    assert "away" in text


def test_machines_out_of_use_are_shown_with_why() -> None:
    place = {"place": "quarantined", "place_by": "incident/gpt/0002", "place_why": "xid-79: GPU 3 is lost"}
    rows = [report(machine="h", findings=[], verdict=Health.HEALTHY, place="active", job="gpt")]
    text = shown(machines_table([*rows, report(machine="q", findings=[], verdict=Health.HEALTHY, **place)]))
    lines = [line.split() for line in text.splitlines()[1:]]
    assert lines[0][:3] == ["q", "quarantined", "healthy"]
    assert "quarantined by incident/gpt/0002: xid-79: GPU 3 is lost" in text
    assert lines[-1] == ["h", "active", "gpt", "healthy"]


def test_what_came_again_says_when_it_did_last() -> None:
    again = FOUND.model_copy(update={"last_ns": 31_000_000_000})
    assert "GPU 3: it is too hot: 95 C, last 30 s ago (gpu-hot;" in shown(machines_table([report(findings=[again])]))


def test_many_healthy_machines_are_counted() -> None:
    text = shown(machines_table([*healthy(HEALTHY_SHOWN + 1), report()]))
    assert f"{HEALTHY_SHOWN + 1} others" in text
    assert "h0" not in text


def test_of_many_findings_some_are_shown_and_the_rest_counted() -> None:
    many = [FOUND.model_copy(update={"item": f"GPU {number}"}) for number in range(8)]
    text = shown(machines_table([report(findings=many)]))
    assert "and 3 more: everstep machines m1" in text


def test_one_machine_shows_every_inspection_with_its_evidence() -> None:
    inspections = [
        InspectionReport(
            name="gpu",
            looks_at="GPUs",
            verdict=Health.FAULTY,
            findings=[FOUND],
            measures={"gpu_count": 8.0},
            note="",
            interval_s=10,
            looked_ns=58_000_000_000,
        ),
        InspectionReport(
            name="dcgm",
            looks_at="DCGM",
            verdict=Health.HEALTHY,
            findings=[],
            measures={},
            note="no dcgmi",
            interval_s=30,
            looked_ns=0,
        ),
    ]
    text = shown(machine_table(report(inspections=inspections)), *measure_lines(report(inspections=inspections)))
    for words in ("3 s ago", "not yet", "no dcgmi", "it slows down at 87 C", "gpu_count 8"):
        assert words in text


def test_what_comes_from_a_machine_is_no_markup_and_moves_no_cursor() -> None:
    nasty = FOUND.model_copy(update={"item": "[red]\x1b[2J"})
    text = shown(machines_table([report(findings=[nasty])]))
    assert "[red]" in text
    assert "\x1b[2J" not in text


def test_what_differs_is_one_line() -> None:
    odd = OddMachine(fact="driver", value="550", machines=["m2"], usual="570")
    assert odd_lines([odd]) == ["differs: driver 550 on m2, 570 elsewhere"]
    assert odd_lines([odd.model_copy(update={"usual": ""})]) == ["differs: driver 550 on m2"]
