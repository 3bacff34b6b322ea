"""A step that takes long reports that it still runs."""

from __future__ import annotations

import threading

import pytest

from controlplane.local import waiting


def test_a_pipe_gets_a_line_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LINE_INTERVAL_S", 0.01)
    said: list[str] = []
    third = threading.Event()

    def progress(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            third.set()

    with waiting.waiting(progress, "building", lambda: "7 of 9"):
        assert third.wait(30)
    assert said[0] == "building"
    assert said[1].startswith("still building: ")
    assert said[1].endswith(", 7 of 9")
    after = len(said)
    assert not threading.Event().wait(0.1)
    assert len(said) == after


def test_the_lines_end_when_the_step_fails() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), waiting.waiting(lambda _: None, "failing"):
        raise KeyError
    assert threading.active_count() == before
