"""The memory of commands, after its file was damaged."""

from __future__ import annotations

from pathlib import Path

from agent.server.idempotency import RequestMemory
from agent.state.live import LiveLines
from agent.v1 import agent_pb2 as pb


async def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    calls = []

    async def launch() -> pb.LaunchReply:
        calls.append(1)
        return pb.LaunchReply(generation=3)

    first, second = (pb.LaunchRequest(job="a", request_id=name) for name in ("one", "two"))
    memory = RequestMemory(LiveLines(tmp_path / "requests.jsonl"))
    for request in (first, second):
        await memory.once("Launch", request, pb.LaunchReply, launch)
    memory.close()
    lines = (tmp_path / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "requests.jsonl").write_bytes(lines[0][:20] + b"\n[]\n{}\n\xff\n" + lines[1])

    again = RequestMemory(LiveLines(tmp_path / "requests.jsonl"))
    assert (await again.once("Launch", second, pb.LaunchReply, launch)).generation == 3
    assert len(calls) == 2, "the undamaged line is remembered"
    await again.once("Launch", first, pb.LaunchReply, launch)
    assert len(calls) == 3
    again.close()
