"""The plots of a report are well-formed for any labels, and their bars are in proportion."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from console.views.report_page import LABEL, VALUE, WIDTH, Bar, horizontal, vertical

ROOM = WIDTH - LABEL - VALUE


def bars(svg: str) -> list[ET.Element]:
    return ET.fromstring(svg).findall(".//rect")


def test_bars_are_in_proportion_and_within_the_plot() -> None:
    half, whole, none, beyond = bars(
        horizontal([Bar("a", 0.5, "50 %"), Bar("b", 1, ""), Bar("c", 0, "", known=False), Bar("d", 7, "")], "x", most=1)
    )
    assert [float(bar.get("width", "")) for bar in (half, whole, none, beyond)] == [ROOM / 2, ROOM, 0, ROOM]
    assert (whole.get("class"), none.get("class")) == ("bar", "bar unknown")
    low, high = bars(vertical([Bar("mon", 1, "1"), Bar("tue", 2, "2")], "x"))
    assert float(high.get("height", "")) == 2 * float(low.get("height", ""))


@pytest.mark.parametrize("draw", [horizontal, vertical])
def test_labels_are_text_and_long_ones_are_cut(draw: object) -> None:
    assert callable(draw)
    label = "<script>alert('x')</script> & \x1b[31m " + 40 * "long"
    svg = draw([Bar(label, 1, '"1"')], label)
    assert "<script" not in svg and "\x1b" not in svg
    texts = [text.text or "" for text in ET.fromstring(svg).findall(".//text")]
    assert any(text.startswith("<script>") and text.endswith("…") and len(text) < 40 for text in texts)
    assert "alert('x')" in (ET.fromstring(svg).findtext(".//title") or "")


@pytest.mark.parametrize("draw", [horizontal, vertical])
def test_nothing_and_zero_are_drawn_as_such(draw: object) -> None:
    assert callable(draw)
    assert bars(draw([], "x")) == []
    assert {bar.get("class") for bar in bars(draw([Bar("a", 0, "0")], "x"))} == {"bar"}


def test_of_many_columns_some_have_a_label() -> None:
    svg = ET.fromstring(vertical([Bar(f"day {day}", day, str(day)) for day in range(365)], "x"))
    assert len(svg.findall(".//rect")) == 365
    assert 1 < len(svg.findall(".//text[@class='name']")) <= 9
    assert svg.findall(".//text[@class='value']") == []
