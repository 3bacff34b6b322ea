"""The options of ``everstep drill``, as the drill gets them."""

from __future__ import annotations

from typing import Any

import pytest

from console.commands import drill


@pytest.mark.parametrize(
    ("fault", "words", "options"),
    [
        ("kill-rank", [], {}),
        ("kill-rank", ["--standbys", "0", "--at-step", "0"], {"standbys": 0, "at_step": 0}),
        (
            "kill-rank",
            ["--rank", "0", "--keep", "--step-seconds", "0"],
            {"ranks": [0], "keep": True, "step_seconds": 0},
        ),
        ("kill-machine", ["--machine", "m1", "--gone"], {"machine": "m1", "gone": True}),
    ],
)
def test_a_drill_gets_only_the_options_that_were_typed(
    monkeypatch: pytest.MonkeyPatch, fault: str, words: list[str], options: dict[str, Any]
) -> None:
    received: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(drill, "_drill", lambda name, chosen: received.append((name, chosen)))
    command = drill.command_of(fault, words)

    command.main(words, standalone_mode=False)

    assert received == [(fault, options)]
