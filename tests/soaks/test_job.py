"""Where the job of a soak waits: at gates, and at strikes of drills."""

from __future__ import annotations

from pathlib import Path

from everstep.rank import drill_faults as faults
from soaks.job import GATE_S, STRIKE_S, SoakGate


def test_a_wait_for_a_strike_is_not_counted_as_a_gate(tmp_path: Path) -> None:
    gate, strikes = SoakGate(tmp_path, 30, 2), SoakGate(tmp_path, 28, 2, "strikes", STRIKE_S)
    assert [hold["hold_s"] for hold in (*gate.holds(), *strikes.holds())] == [GATE_S] * 2 + [STRIKE_S] * 2

    for hold in strikes.holds():
        assert faults.claim(tmp_path, hold)
    assert strikes.reached and not gate.reached
    strikes.open()
    assert all(Path(hold["until"]).exists() for hold in strikes.holds())
    assert not any(Path(hold["until"]).exists() for hold in gate.holds())
