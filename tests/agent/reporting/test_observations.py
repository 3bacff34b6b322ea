"""The log of observations is numbered, keeps each observation until it is acknowledged, and survives any kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from agent.reporting import observations
from agent.reporting.observations import OF_NO_JOB, ObservationLog
from agent.state.live import LiveLines
from agent.v1 import agent_pb2 as pb

_opened: list[ObservationLog] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def opened(folder: Path) -> ObservationLog:
    _opened.append(ObservationLog(LiveLines(folder / "log.jsonl"), "m1"))
    return _opened[-1]


def tell(log: ObservationLog, job: str, rank: int = 0) -> int:
    return log.append(job=job, generation=1, rank_ended=pb.RankEnd(rank=rank, exception="E: ü\nx")).sequence


async def kept(log: ObservationLog, after: int = 0, job: str = "") -> list[int]:
    found = []
    stream = log.follow(after, job)
    while True:
        try:
            found.append((await asyncio.wait_for(anext(stream), 0.05)).sequence)
        except TimeoutError:
            return found


async def test_what_was_told_survives(tmp_path: Path) -> None:
    log = opened(tmp_path)
    numbers = [tell(log, "a"), tell(log, "b"), tell(log, "a")]
    again = opened(tmp_path)  # the first log was never closed, as after a kill
    assert numbers == [1, 2, 3]
    assert await kept(again) == [1, 2, 3]
    assert await kept(again, after=1) == [2, 3]
    assert await kept(again, job="a") == [1, 3]
    assert (await anext(again.follow(2))).rank_ended.exception == "E: ü\nx"
    assert tell(again, "a") == 4


async def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    log = opened(tmp_path)
    tell(log, "a")
    tell(log, "a")
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    again = opened(tmp_path)
    assert await kept(again) == [1]
    tell(again, "a")
    assert await kept(opened(tmp_path)) == [1, 2]


async def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for _ in range(3):
        tell(log, "a")
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[2] = b'{"sequence": "nonsense"}'
    path.write_bytes(b"\n".join(lines))
    assert await kept(opened(tmp_path)) == [1, 3]


async def test_acknowledged_numbers_go_and_are_never_used_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for _ in range(3):
        tell(log, "a")
        tell(log, "b")
    log.acknowledge(4, "a")
    assert await kept(log) == [2, 4, 5, 6]
    log.acknowledge(6)
    again = opened(tmp_path)
    assert await kept(again) == []
    assert tell(again, "a") == 7


async def test_what_is_of_no_job_is_acknowledged_apart(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for job in ("", "a", "", "a"):
        tell(log, job)
    log.acknowledge(4, "a")
    assert await kept(log) == [1, 3]
    log = opened(tmp_path)
    assert await kept(log) == [1, 3]
    log.acknowledge(2, OF_NO_JOB)
    assert await kept(log) == await kept(opened(tmp_path)) == [3]


async def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for _ in range(500):
        log.acknowledge(tell(log, "a"))
    assert len((tmp_path / "log.jsonl").read_bytes().splitlines()) < 200
    assert tell(opened(tmp_path), "a") == 501


async def test_a_follower_hears_what_comes(tmp_path: Path) -> None:
    log = opened(tmp_path)
    stream = log.follow(0, "a")
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    tell(log, "b")
    number = tell(log, "a")
    assert (await waiting).sequence == number


async def test_a_watcher_that_is_ahead_of_a_lost_log_hears_all(tmp_path: Path) -> None:
    log = opened(tmp_path)
    tell(log, "a")
    assert await kept(log, after=57) == [1]


async def test_numbers_leap_after_a_reboot(tmp_path: Path) -> None:
    log = opened(tmp_path)
    tell(log, "a")
    path = tmp_path / "log.jsonl"
    header, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(header) | {"boot": "another"}), *rest]) + "\n")
    assert tell(opened(tmp_path), "a") > observations.REBOOT_GAP


async def test_nobody_listening_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "KEPT", 10)
    log = opened(tmp_path)
    for _ in range(300):
        tell(log, "a")
    assert await kept(opened(tmp_path)) == list(range(291, 301))
    assert len((tmp_path / "log.jsonl").read_bytes().splitlines()) < 100


async def test_a_full_disk_does_not_keep_an_end_from_those_who_listen(tmp_path: Path) -> None:
    log = opened(tmp_path)
    waiting = asyncio.create_task(kept(log))
    await asyncio.sleep(0.01)  # now the task listens
    assert log._file._file
    log._file._file.close()
    log._file._file = FileIO("/dev/full", "w")
    tell(log, "a")
    assert await waiting == [1]
    assert not (tmp_path / "log.jsonl").exists(), (
        "an incomplete log file is removed, since it would be taken for a complete one"
    )
    tell(log, "a")
    assert await kept(opened(tmp_path)) == [1, 2], "the complete log is written as soon as there is room"


async def test_active_findings_come_after_what_is_kept_and_have_no_number(tmp_path: Path) -> None:
    log = opened(tmp_path)
    tell(log, "a")
    hot = pb.Finding(inspection="gpu", reason="gpu-hot", item="GPU 3", since_ns=5)
    following = log.follow(0, "a", lambda: [hot])
    seen = [await anext(following), await anext(following)]
    tell(log, "a")
    seen.append(await anext(following))
    assert [observation.sequence for observation in seen] == [1, 0, 2]
    assert (seen[1].id, seen[1].machine_finding.finding) == ("m1-gpu-gpu-hot-GPU-3-5", hot)
