"""Storage is checked before a job starts. Only problems that do not pass by themselves are named. No file is left."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from agent.checkpoints.tiers import storage_check
from agent.checkpoints.tiers.storage_check import checks, disk_problem, remote_problem
from agent.server.checkpoint_service import CheckpointsService
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError
from tests.agent.agents import running_agent


class NoCredentialsError(Exception):
    """An error with the name that drivers use."""


class Closed(MemoryFileSystem):  # type: ignore[misc]
    """A bucket that fails with a chosen error."""

    protocol = "closed"
    error: Exception = OSError()

    def pipe_file(self, *_: object, **__: object) -> None:
        raise self.error


def test_a_folder_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    assert disk_problem(tmp_path, "gpt") == ""
    assert remote_problem(f"file://{tmp_path}", "gpt") == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["gpt"]


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert disk_problem(tmp_path / "x", "gpt") == f"disk_path {tmp_path}/x does not exist: make it, or mount it"
    assert disk_problem(tmp_path / "file", "gpt") == f"disk_path {tmp_path}/file is not a folder"
    assert f"remote_url file://{tmp_path}/x does not exist" in remote_problem(f"file://{tmp_path}/x", "gpt")
    assert not (tmp_path / "x").exists()


def test_a_folder_that_takes_no_files_is_named_with_the_reason() -> None:
    assert disk_problem(Path("/proc/self"), "gpt").startswith("disk_path /proc/self cannot be written to: ")


@pytest.mark.parametrize("url", ["s3://bucket/runs", "nonsense-of-mine://x"])
def test_a_driver_that_is_missing_is_named(url: str) -> None:
    assert url in remote_problem(url, "gpt")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("AccessDenied"), "cannot be written to: AccessDenied. The agents need credentials"),
        (NoCredentialsError("Unable to locate credentials"), "Unable to locate credentials"),
        (FileNotFoundError("no bucket"), "does not exist: make the folder or bucket first"),
        (OSError("throttled"), ""),
        (TimeoutError(), ""),
    ],
)
def test_only_what_does_not_pass_by_itself_is_a_problem(error: Exception, said: str) -> None:
    register_implementation("closed", Closed, clobber=True)
    Closed.error = error
    found = remote_problem("closed://bucket/runs", "gpt")
    assert said in found
    assert bool(found) == bool(said)


def test_nothing_is_looked_at_that_is_not_set() -> None:
    assert checks("gpt", "", "") == []


async def test_an_agent_says_what_it_cannot_write(tmp_path: Path) -> None:
    request = pb.CheckStorageRequest(job="gpt", disk_path=f"{tmp_path}/x", remote_url="s3://bucket")
    async with running_agent(tmp_path) as agent:
        reply = await agent.client.check_storage(request)
        assert [said.split(" ")[0] for said in reply.problems] == ["disk_path", "remote_url"]
        with pytest.raises(ConfigError, match="not a job name"):
            await agent.client.check_storage(pb.CheckStorageRequest(job="../x", disk_path=str(tmp_path)))


async def test_storage_that_hangs_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()

    def broken() -> str:
        raise RuntimeError("a driver of its own kind")

    looks = [lambda: str(hanging.wait(30)), lambda: "full", broken]
    monkeypatch.setattr(storage_check, "PATIENCE_S", 0.1)
    monkeypatch.setattr(storage_check, "checks", lambda *_: looks)
    service: Any = SimpleNamespace(host=SimpleNamespace(machine="m1"))
    asked: Any = CheckpointsService.CheckStorage(service, pb.CheckStorageRequest(job="gpt"), object())  # type: ignore[arg-type]
    reply = await asked
    assert list(reply.problems) == ["full"]
    hanging.set()


async def test_looks_that_hang_take_no_thread_from_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = threading.Event()
    monkeypatch.setattr(storage_check, "PATIENCE_S", 0.1)
    try:
        assert await storage_check.problems([lambda: str(hanging.wait(60))] * 64) == []
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        hanging.set()


@pytest.mark.parametrize(("number", "refused"), [(errno.ESTALE, False), (errno.EIO, False), (errno.EROFS, True)])
def test_a_share_whose_server_is_away_is_not_judged(
    number: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    assert bool(disk_problem(tmp_path, "gpt")) == refused


def test_on_object_storage_a_right_to_the_job_s_own_names_suffices() -> None:
    """Credentials may be limited to the names of one job."""

    class Strict(MemoryFileSystem):  # type: ignore[misc]
        protocol = "strict"

        def pipe_file(self, path: str, *args: object, **kwargs: object) -> None:
            if "/runs/gpt/" not in path:
                raise PermissionError("AccessDenied")
            super().pipe_file(path, *args, **kwargs)

    register_implementation("strict", Strict, clobber=True)
    assert remote_problem("strict://bucket/runs", "gpt") == ""
    assert "AccessDenied" in remote_problem("strict://bucket/runs", "bert")


def test_machines_with_the_same_problem_say_the_same(tmp_path: Path) -> None:
    """Otherwise a person would get the same problem as often as there are machines."""
    said = {remote_problem(f"file://{tmp_path}/none", "gpt") for _ in range(3)}
    assert len(said) == 1
