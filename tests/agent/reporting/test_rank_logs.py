"""The captured output of ranks: how it is rotated, read and followed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.reporting import rank_logs
from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, running_agent, until


def test_a_rotation_loses_no_output_and_keeps_the_newest_files(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    with path.open("ab", buffering=0) as writer:  # the rank opens its log in this way
        for number in range(5):
            writer.write(b"%d" % number * 100)
            assert rank_logs.rotate(path, 50, 3)
        writer.write(b"end")
    assert not rank_logs.rotate(path, 50, 3)
    assert path.read_bytes() == b"end"
    assert rank_logs.tail(path, 1000) == b"2" * 100 + b"3" * 100 + b"4" * 100 + b"end"
    assert rank_logs.tail(path, 5) == b"44end"
    assert not rank_logs.rotate(tmp_path / "nonsuch", 50, 3)


async def test_a_log_is_followed_through_a_rotation(tmp_path: Path) -> None:
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


async def test_an_agent_rotates_logs_and_reads_them(tmp_path: Path) -> None:
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
        await until(lambda: b"done" in (folder / "rank-0.err").read_bytes(), "the rank has written everything")
        await until(lambda: (folder / "rank-0.out").stat().st_size < 1 << 20, "the last rotation is done")
        lines = (await job.log(0, pb.ReadLogRequest.STDOUT)).splitlines()
        assert int(lines[-1]) == 29_999
        assert len(lines) > 10_000
        assert len(await job.log(0, pb.ReadLogRequest.STDOUT, tail=50)) == 50
