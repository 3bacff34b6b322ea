"""Captured output: rotation, tails, following, and the exception in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.reporting import rank_logs
from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, running_agent, until

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
    assert rank_logs.exception_in(text) == expected


def test_a_generation_has_its_own_part_of_the_log() -> None:
    def mark(generation: int) -> bytes:
        return f"--- everstep: rank 0, generation {generation}, pid 1, 2026-01-01T00:00:00Z\n".encode()

    text = mark(1) + b"one\n" + mark(2) + b"two\n"
    assert rank_logs.of_generation(text, 1) == b"one\n"
    assert rank_logs.of_generation(text, 2) == b"two\n"
    assert rank_logs.of_generation(text, 3) == b""
    assert rank_logs.of_generation(b"no mark in sight", 2) == b"no mark in sight"


def test_rotation_loses_nothing_and_keeps_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    with path.open("ab", buffering=0) as writer:  # as a rank holds it
        for number in range(5):
            writer.write(b"%d" % number * 100)
            assert rank_logs.rotate(path, 50, 3)
        writer.write(b"end")
    assert not rank_logs.rotate(path, 50, 3)
    assert path.read_bytes() == b"end"
    assert rank_logs.tail(path, 1000) == b"2" * 100 + b"3" * 100 + b"4" * 100 + b"end"
    assert rank_logs.tail(path, 5) == b"44end"
    assert not rank_logs.rotate(tmp_path / "nonsuch", 50, 3)


async def test_following_through_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    path.write_bytes(b"old|")
    stream = rank_logs.read_log({pb.ReadLogRequest.STDOUT: path}, tail_bytes=2, follow=True, reads=Reads())
    assert (await anext(stream)).data == b"d|"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"before|")
        rank_logs.rotate(path, 1, 2)
        writer.write(b"after")
    async with asyncio.timeout(10):
        assert (await anext(stream)).data == b"before|after"


async def test_an_agent_rotates_and_reads_back(tmp_path: Path) -> None:
    script = """
import sys, time
for number in range(30_000):
    print(f"{number:0100d}")
print("done", file=sys.stderr, flush=True)
time.sleep(1000)
"""
    async with running_agent(tmp_path, "--log-mib", "1") as agent:
        job = Job(agent, script, ranks=1)
        await job.prepare()
        await job.launch()
        folder = agent.state / "jobs" / job.name / "logs"
        await until((folder / "rank-0.out.1").exists, "the log is rotated")
        await until(lambda: b"done" in (folder / "rank-0.err").read_bytes(), "all is written")
        await until(lambda: (folder / "rank-0.out").stat().st_size < 1 << 20, "the last rotation")
        lines = (await job.log(0, pb.ReadLogRequest.STDOUT)).splitlines()
        assert int(lines[-1]) == 29_999
        assert len(lines) > 10_000
        assert len(await job.log(0, pb.ReadLogRequest.STDOUT, tail=50)) == 50
