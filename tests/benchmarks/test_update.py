"""The parts of an update's time, and which measurement is compared with which target."""

from __future__ import annotations

from benchmarks.common import Row
from benchmarks.update import Results, summarise, where_it_went
from benchmarks.update_parts import PARTS, Seen, parts_of
from benchmarks.update_side import Switch
from everstep.model.launch import Confirmation

BEGAN_NS = 1_700_000_000_000_000_000
WITHIN = {"start": 0.01, "import": 0.02, "rendezvous": 0.03, "restore": 0.04, "next step": 0.1}


def at(seconds: float) -> int:
    return BEGAN_NS + round(seconds * 1e9)


def test_the_parts_of_an_update_sum_up_to_its_time() -> None:
    job = Seen(
        scheduled={"Make version": at(0.05), "Check version": at(0.2)},
        completed={"Make version": at(0.15), "Check version": at(0.6)},
    )
    incident = Seen(
        scheduled={"Align ranks": at(0.7), "Launch ranks": at(1.1)},
        completed={"Align ranks": at(0.8), "Stop ranks": at(1.0)},
    )
    confirmation = Confirmation(ok=True, reason="", generation=2, parts=WITHIN, stepped_ns=at(1.5))
    parts = parts_of(BEGAN_NS, 1.5, job, incident, confirmation)

    expected = dict(zip(PARTS, [0.05, 0.1, 0.45, 0.1, 0.1, 0.2, 0.1, 0.2, *WITHIN.values()], strict=True))
    assert {name: round(value, 6) for name, value in parts.items()} == expected | {"unaccounted": 0.0}
    assert list(parts)[:-1] == list(PARTS)
    table = where_it_went("an update", [Switch(1.5, 0.8, parts)]).splitlines()
    assert table[3].split() == ["try", "0.450", "0.450"]


def test_both_measured_times_are_compared_with_a_requeue() -> None:
    results = Results(updates=[Switch(2.0, 0.5), Switch(4.0, 1.5)], requeues=[22.0, 22.0])
    rows = {row.name: row for row in summarise(results)}

    def met(name: str) -> tuple[float | None, bool | None]:
        row: Row = rows[name]
        return row.ours, row.met

    assert met("last step to next step of all ranks, torchrun, median") == (1.0, True)
    assert met("request to next step of all ranks, torchrun, median") == (3.0, False)
    assert met("request to next step of all ranks, median") == (3.0, False)
