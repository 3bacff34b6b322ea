"""The arithmetic that benchmarks share."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import Row, Spread, finish, quantile, rows_of, show, show_json


def test_quantiles_lie_between_the_nearest_values() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 0.9, 1)] == [1.0, 2.0, 3.0, 4.6, 5.0]
    assert Spread.of(values) == Spread(3.0, 4.6, 5.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_a_quantile_needs_values_and_a_valid_share(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        quantile(values, share)


@pytest.mark.parametrize(
    ("row", "ratio", "met"),
    [
        (Row("faster", "s", 1.0, 10.0, 0.2), 0.1, True),
        (Row("just", "s", 2.0, 10.0, 0.2), 0.2, True),
        (Row("slower", "s", 3.0, 10.0, 0.2), 0.3, False),
        (Row("no peer", "s", 3.0, None, 0.2), None, None),
        (Row("not measured", "s", None, 3.0, 0.2), None, None),
        (Row("no aim", "s", 3.0, 1.0), 3.0, None),
        (Row("absolute", "s", 0.4, None, 0.5, aim_of="ours"), None, True),
        (Row("absolute, missed", "s", 0.6, None, 0.5, aim_of="ours"), None, False),
        (Row("throughput", "steps/s", 99.0, 100.0, 0.99, larger=True), 0.99, True),
        (Row("throughput, missed", "steps/s", 98.0, 100.0, 0.99, larger=True), 0.98, False),
    ],
)
def test_a_target_is_met_missed_or_unknown(row: Row, ratio: float | None, met: bool | None) -> None:
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))
    assert row.met is met
    assert {"name", "ours", "peer", "ratio", "aim", "met"} <= row.as_json().keys()


def test_a_peer_that_did_not_run_has_no_figures() -> None:
    rows = rows_of("step", "s", [1.0, 2.0], [], aim=0.2)
    assert [row.name for row in rows] == ["step, median", "step, p90", "step, maximum"]
    assert [(row.ours, row.peer, row.met) for row in rows] == [(1.5, None, None), (1.9, None, None), (2.0, None, None)]


def test_the_output_has_the_machine_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("a", "s", 1.0, 10.0, 0.2), Row("b", "s", 1.0)]
    show("nothing", rows, ["a note"])
    text = capsys.readouterr().out
    assert "cores" in text
    assert "<= 0.2 met" in text
    assert "a note" in text
    show_json("nothing", rows, runs=[])
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["torch"]
    assert [row["met"] for row in found["rows"]] == [True, None]


def test_an_incomplete_comparison_is_named_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    finish([])
    with pytest.raises(SystemExit) as ended:
        finish(["DLRover memory: it cannot be installed", "DCP async: rank 0 left no result"] * 2)
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.count("DLRover memory: it cannot be installed") == told.count("DCP async: rank 0") == 1
