"""The Temporal server is searched for in a fixed order, and the embedded server starts with all settings."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sqlite3
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import PollWorkflowTaskQueueRequest
from temporalio.client import Client

from controlplane.local import cluster_processes, ports, readiness, temporal_binary, temporal_server
from everstep.base.addresses import Address
from everstep.errors import ClusterError
from tests.hosts import IPV6
from workflows import attributes
from workflows.start_activity import TASK_TIMEOUT


def program(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "temporal"
    path.write_text(f"#!/bin/sh\necho 'temporal version 1.0.0 (Server {version}, UI 2.0)'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a machine with an empty cache, only a shell on PATH, and no access to downloads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused.getsockname()[1]}")
    return tmp_path


def test_a_configured_address_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "bin", "1.31.2")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    choice = temporal_server.find(lambda _: None)
    assert (choice.source, choice.address, choice.binary) == ("configured", "temporal.example:7233", None)


def test_a_profile_file_can_configure_the_address(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bare / "temporal.toml"
    file.write_text('[profile.default]\naddress = "temporal.example:7233"\nnamespace = "mine"\n')
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(file))
    choice = temporal_server.find(lambda _: None)
    assert (choice.address, choice.namespace) == ("temporal.example:7233", "mine")


def test_an_unknown_profile_is_an_error(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_PROFILE", "nowhere")
    with pytest.raises(ClusterError, match="nowhere"):
        temporal_server.find(lambda _: None)


def test_a_server_on_path_is_preferred_to_the_cache(bare: Path) -> None:
    cached = program(bare / "cache" / "everstep" / "bin", "1.31.2")
    assert temporal_server.find(lambda _: None).binary == cached
    on_path = program(bare / "bin", "1.30.0")
    said: list[str] = []
    assert temporal_server.find(said.append).binary == on_path
    assert "on PATH" in said[-1]
    assert "is server 1.30.0; settings and times were measured on 1.31" in said[0]
    program(bare / "bin", "1.31.9")
    said.clear()
    temporal_server.find(said.append)
    assert not any("warning" in line for line in said)


def test_a_server_that_is_too_old_is_skipped_with_a_message(bare: Path) -> None:
    cached = program(bare / "cache" / "everstep" / "bin", "1.31.2")
    program(bare / "bin", "1.24.0")
    said: list[str] = []
    assert temporal_server.find(said.append).binary == cached
    assert "is not used: its server is 1.24.0" in said[0]


def test_without_a_server_the_error_names_every_way_to_get_one(bare: Path) -> None:
    said: list[str] = []
    with pytest.raises(ClusterError, match=r"download failed .*Go is not on PATH.*TEMPORAL_ADDRESS"):
        temporal_server.find(said.append)
    assert any(line.startswith("downloading") for line in said)


def test_the_output_of_a_failed_build_is_shown(bare: Path) -> None:
    go = program(bare / "bin", "0").rename(bare / "bin" / "go")
    go.write_text("#!/bin/sh\necho 'go: no module for you' >&2\nexit 1\n")
    with pytest.raises(ClusterError, match="no module for you"):
        temporal_server.find(lambda _: None)


def test_the_tool_module_has_our_version_of_the_cli() -> None:
    text = (temporal_binary.TOOL_MODULE / "go.mod").read_text()
    assert f"github.com/temporalio/cli v{temporal_binary.CLI_VERSION}\n" in text
    assert f"tool {temporal_binary.PACKAGE}\n" in text


async def test_the_server_has_search_attributes_and_a_fast_journal(home: Path) -> None:
    found = temporal_binary.installed(lambda _: None)
    assert found, "no Temporal server: run `make temporal`"
    with ports.Claims() as claims:
        port, ui_port = claims.choose("127.0.0.1").port, claims.choose("127.0.0.1").port
        await _check_server(found[0], port, ui_port, home / "temporal.db")


@IPV6
async def test_a_server_may_have_an_ipv6_address(home: Path) -> None:
    found = temporal_binary.installed(lambda _: None)
    assert found, "no Temporal server: run `make temporal`"
    with ports.Claims() as claims:
        port, ui_port = claims.choose("::1").port, claims.choose("::1").port
        command = temporal_server.start_command(
            found[0], port=port, ui_port=ui_port, database=home / "temporal.db", namespace="everstep"
        )
        command[command.index("127.0.0.1")] = "::1"
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # noqa: ASYNC220
            try:
                client = await _healthy(str(Address("::1", port)))
                assert client.namespace == "everstep"
            finally:
                server.terminate()
                server.wait(30)


async def _check_server(binary: Path, port: int, ui_port: int, database: Path) -> None:
    command = temporal_server.start_command(binary, port=port, ui_port=ui_port, database=database, namespace="everstep")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # noqa: ASYNC220 - the loop has nothing else to do
        try:
            assert readiness.holds(lambda: not ports.is_free("127.0.0.1", port), 60)
            client = await _healthy(f"127.0.0.1:{port}")
            listed = await client.operator_service.list_search_attributes(
                ListSearchAttributesRequest(namespace="everstep")
            )
            assert {key.name for key in attributes.ALL} <= set(listed.custom_attributes)
            with sqlite3.connect(database) as connection:
                assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
            connection.close()
        finally:
            server.terminate()
            identity = cluster_processes.identify(server.pid)
            server.wait(30)
    assert identity is None or not cluster_processes.alive(identity)


async def _healthy(address: str) -> Client:
    """Return a client as soon as the server accepts one. The server listens before it is healthy."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(RuntimeError):
                return await Client.connect(address, namespace="everstep")
            await asyncio.sleep(0.05)


async def test_a_workflow_task_that_times_out_often_gets_little_more_time(home: Path) -> None:
    """With the server's default, the fifth attempt has 10 s more than the first, and later ones up to ten minutes."""
    found = temporal_binary.installed(lambda _: None)
    assert found, "no Temporal server: run `make temporal`"
    with ports.Claims() as claims:
        port, ui_port = claims.choose("127.0.0.1").port, claims.choose("127.0.0.1").port
        command = temporal_server.start_command(
            found[0], port=port, ui_port=ui_port, database=home / "temporal.db", namespace="everstep"
        )
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # noqa: ASYNC220
            try:
                given_s = await _time_of_attempts(await _healthy(f"127.0.0.1:{port}"), attempts=6)
            finally:
                server.terminate()
                server.wait(30)
    assert given_s[-1] < 3 * given_s[0], given_s


async def _time_of_attempts(client: Client, attempts: int) -> list[float]:
    """Return the time that the server gives each attempt of a workflow task, seconds. No attempt is answered."""
    await client.start_workflow("none", id="none", task_queue="none", task_timeout=TASK_TIMEOUT)
    begun: list[float] = []
    while len(begun) < attempts:
        polled = await client.workflow_service.poll_workflow_task_queue(
            PollWorkflowTaskQueueRequest(namespace="everstep", task_queue=TaskQueue(name="none"), identity="test")
        )
        if polled.task_token:
            assert polled.attempt == len(begun) + 1
            begun.append(time.monotonic())
    return [later - earlier for earlier, later in pairwise(begun)]


def test_the_server_knows_every_setting() -> None:
    """The server ignores a mistyped dynamic setting. So the test searches for the names in the program file itself."""
    found = temporal_binary.installed(lambda _: None)
    assert found, "no Temporal server: run `make temporal`"
    assert shutil.which(str(found[0]))
    binary = found[0].read_bytes()
    for name in temporal_server.DYNAMIC_CONFIG:
        assert name.encode() in binary, name
