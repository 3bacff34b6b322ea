"""How an agent finds the exception in a rank's output, and which part of the output belongs to a generation."""

from __future__ import annotations

import pytest

from agent.state.rank_record import exception_in, of_generation

CHAINED = b"""Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise custom.Problem("first line
custom.Problem: first line
second line: of the message
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHAINED, "custom.Problem: first line"),
        (
            b"[rank3]: Traceback (most recent call last):\n[rank3]:   File\n[rank3]: KeyError: 1\n",
            "KeyError: 1",
        ),
        (b"Traceback (most recent call last):\n  File\nKeyboardInterrupt\nlater words\n", "KeyboardInterrupt"),
        (b'  File "x.py", line 1\n    this is\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        (
            b"Traceback (most recent call last):\n  File\nRuntimeError: \n\n   [Stage 0] failed to run\n",
            "RuntimeError: [Stage 0] failed to run",
        ),
        (b"Traceback (most recent call last):\n  File\nRuntimeError: \n", "RuntimeError:"),
        (b"UserWarning: nothing\nsome words: here\n", ""),
        (b"", ""),
        (b"\xff\xfe Traceback", ""),
    ],
)
def test_the_exception_of_the_last_traceback(text: bytes, expected: str) -> None:
    assert exception_in(text) == expected


def test_each_generation_has_its_own_part_of_the_log() -> None:
    def mark(generation: int) -> bytes:
        return f"--- everstep: rank 0, generation {generation}, pid 1, 2026-01-01T00:00:00Z\n".encode()

    text = mark(1) + b"one\n" + mark(2) + b"two\n"
    assert of_generation(text, 1) == b"one\n"
    assert of_generation(text, 2) == b"two\n"
    assert of_generation(text, 3) == b""
    assert of_generation(b"no mark in sight", 2) == b"no mark in sight"
