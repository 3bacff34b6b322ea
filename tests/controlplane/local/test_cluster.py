"""A cluster starts, grows, survives kills, and ends completely. The Temporal server is real."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.versions.listing import files_of
from controlplane.local import cluster as local
from controlplane.local import cluster_processes, ports, stopping
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.commands import Commands
from controlplane.local.grow import grow
from controlplane.local.plan import ClusterPlan, hold
from controlplane.local.readiness import holds
from everstep.base.addresses import Ports, parse_address
from everstep.errors import ClusterError, ConfigError

NAME = "trial"
PATIENCE_S = 60.0


def test_up_is_idempotent_and_can_grow_and_down_leaves_nothing(home: Path, commands: Commands) -> None:
    said: list[str] = []
    cluster = local.up(NAME, machines=1, standbys=1, workers=1, progress=said.append, commands=commands)
    first = local.processes(cluster)
    assert set(first) == {"temporal", "template", "agent-m0", "agent-m1", "worker-0"}
    assert said[0].startswith("Temporal: ")
    assert ClusterFile.load(NAME) == cluster
    assert [name for name in files_of(home) if f"/{NAME}/" in name] == [], (
        "a snapshot of the parent folder has no files of the cluster"
    )

    assert local.up(NAME, machines=1, standbys=1, workers=1, commands=commands) == cluster
    assert local.processes(cluster) == first

    grown = local.up(NAME, machines=2, standbys=1, workers=2, commands=commands)
    assert grown.machines[:2] == cluster.machines
    second = local.processes(grown)
    assert first.items() <= second.items()
    assert set(second) - set(first) == {"agent-m2", "worker-1"}
    assert (
        local.up(NAME, machines=1, standbys=0, workers=1, commands=commands) == grown
    )  # a smaller request changes nothing

    assert local.down(NAME)
    assert not cluster_processes.of_cluster(cluster.id)
    assert not any(cluster_processes.identify(pid) for pid in second.values())
    assert not cluster.shm.exists()
    with pytest.raises(ClusterError, match="everstep up"):
        ClusterFile.load(NAME)
    assert not local.down(NAME)

    again = local.up(NAME, machines=2, standbys=1, workers=2, commands=commands)
    assert again == grown  # the machines keep their addresses
    local.down(NAME, purge=True)
    assert not cluster.home.exists()


def test_the_ports_of_agents_can_be_chosen(home: Path, commands: Commands) -> None:
    ports = Ports(23_000, 23_099)
    cluster = local.up(NAME, machines=2, standbys=0, workers=1, at_most=3, commands=commands, port_range=ports)
    assert all(parse_address(machine.address).port in ports for machine in cluster.machines)
    environments = [entry.env for entry in ClusterPlan.load(cluster.home).processes if entry.kind == "agent"]
    assert {env["EVERSTEP_DATA_PORT"] for env in environments} == {"23000-23099"}
    grow(NAME, 3)
    assert parse_address(ClusterFile.load(NAME).machines[2].address).port in ports
    with pytest.raises(ClusterError, match="is up with the ports 23000-23099, so it cannot use 24000-24099"):
        local.up(NAME, machines=2, commands=commands, port_range=Ports(24_000, 24_099))
    local.down(NAME)
    again = local.up(NAME, machines=2, standbys=0, workers=1, commands=commands)
    assert again.machines == cluster.machines, "the range is kept"
    local.down(NAME)
    other = Ports(24_000, 24_099)
    moved = local.up(NAME, machines=2, standbys=0, workers=1, commands=commands, port_range=other)
    assert all(parse_address(machine.address).port in other for machine in moved.machines)


def test_every_killed_process_is_started_again(home: Path, commands: Commands) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=2, commands=commands)
    before = local.processes(cluster)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    assert holds(lambda: all(count >= 1 for count in local.restart_counts(cluster).values()), PATIENCE_S)
    local.up(NAME, machines=1, standbys=0, workers=2, commands=commands)  # this waits until all processes answer
    after = local.processes(cluster)
    assert set(after) == set(before)
    assert not set(after.values()) & set(before.values())


def test_a_cluster_whose_supervisor_was_killed_is_adopted_or_stopped(home: Path, commands: Commands) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    before = local.processes(cluster)
    for action in ("adopt", "stop"):
        supervisor = local.supervisor_of(cluster.home)
        assert supervisor
        cluster_processes.send(supervisor, signal.SIGKILL)
        assert not cluster_processes.wait_gone([supervisor], PATIENCE_S)
        if action == "adopt":
            local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
            assert local.processes(cluster) == before
    assert local.down(NAME)
    assert not cluster_processes.of_cluster(cluster.id)
    assert not cluster.shm.exists()


@pytest.mark.parametrize("lost", ["cluster.json", "state.json", "the whole folder"])
def test_down_works_without_the_clusters_files(home: Path, commands: Commands, lost: str) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    if lost == "the whole folder":
        shutil.rmtree(cluster.home)
    else:
        (cluster.home / lost).write_text("{ damaged")
    assert local.down(NAME)
    assert not cluster_processes.of_cluster(cluster.id)
    assert not cluster.shm.exists()


def test_a_port_in_use_is_named(home: Path, commands: Commands) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    local.down(NAME)
    host, port = cluster.machines[0].address.split(":")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, int(port)))
        taken.listen()
        with pytest.raises(ClusterError, match=f"another process uses {host}:{port}, which agent-m0"):
            local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)


def test_a_process_that_dies_is_named_with_its_logs_last_line(home: Path, commands: Commands) -> None:
    broken = replace(commands, agent=lambda *_: ["/bin/sh", "-c", "echo no such card >&2; exit 1"])
    with pytest.raises(
        ClusterError, match=r"agent-m0 dies repeatedly after its start: .*agent-m0.log ends with 'no such"
    ):
        local.up(NAME, machines=1, standbys=0, workers=1, commands=broken)


def test_shared_memory_is_removed_only_if_its_cluster_is_gone(home: Path, commands: Commands) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    checkpoint = cluster.shm / "m0" / "job" / "checkpoint-0"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_bytes(b"state")
    stopping.kill_all(cluster.id, set())  # as if the user's complete session was killed
    gone = local.SHM_ROOT / f"{NAME}-0123abcd"
    stopping.make_shared_memory(gone, home / "no such folder")
    said: list[str] = []
    local.up(NAME, machines=1, standbys=0, workers=1, progress=said.append, commands=commands)
    assert checkpoint.read_bytes() == b"state"
    assert not gone.exists()
    assert any(str(gone) in line for line in said)


def test_a_configured_server_that_does_not_answer_is_named_at_once(
    home: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ClusterError, match=r"configured Temporal server .* does not answer"):
        local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)


def test_up_waits_until_a_purge_has_removed_the_folder(
    home: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``down --purge`` and ``up`` at the same time: the new cluster keeps its files."""
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    began, go_on, remove = threading.Event(), threading.Event(), shutil.rmtree

    def slowly(path: Path, **options: Any) -> None:
        if path == cluster.home:
            began.set()
            assert go_on.wait(PATIENCE_S)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    with ThreadPoolExecutor() as threads:
        down = threads.submit(local.down, NAME, purge=True)
        assert began.wait(PATIENCE_S)
        up = threads.submit(local.up, NAME, machines=1, standbys=0, workers=1, commands=commands)
        time.sleep(0.5)
        assert not up.done()
        go_on.set()
        assert down.result()
        again = up.result()

    assert (again.home / "cluster.json").exists()
    assert local.processes(again).keys() >= {"temporal", "agent-m0", "worker-0"}


def test_agents_get_the_monitors_settings_and_a_running_cluster_keeps_them(
    home: Path, commands: Commands, tmp_path: Path
) -> None:
    settings, other = tmp_path / "monitor.toml", tmp_path / "other.toml"
    for path in (settings, other):
        path.write_text("[gpu]\ninterval_s = 5\n")
    given = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands, monitor=settings)
    pids = local.processes(given)
    assert _environment(pids["agent-m0"])["EVERSTEP_MONITOR"] == str(settings)
    assert "EVERSTEP_MONITOR" not in _environment(pids["worker-0"])
    assert local.up(NAME, machines=1, standbys=0, workers=1, commands=commands) == given
    with pytest.raises(ClusterError, match=r"other.toml: .* is running with the settings of .*monitor.toml"):
        local.up(NAME, machines=1, standbys=0, workers=1, commands=commands, monitor=other)
    assert local.processes(given) == pids


def test_workers_get_the_file_of_receivers_and_a_running_cluster_keeps_it(
    home: Path, commands: Commands, tmp_path: Path
) -> None:
    receivers, other = tmp_path / "notices.toml", tmp_path / "other.toml"
    for path in (receivers, other):
        path.write_text('[[receiver]]\nname = "mail"\ncommand = ["true"]\n')
    given = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands, notices=receivers)
    pids = local.processes(given)
    assert _environment(pids["worker-0"])["EVERSTEP_NOTICES"] == str(receivers)
    assert _environment(pids["worker-0"])["EVERSTEP_UI_URL"] == given.ui_url
    assert "EVERSTEP_NOTICES" not in _environment(pids["agent-m0"])
    assert local.up(NAME, machines=1, standbys=0, workers=1, commands=commands) == given
    with pytest.raises(ClusterError, match=r"--notices .*other.toml: .* with the settings of .*notices.toml"):
        local.up(NAME, machines=1, standbys=0, workers=1, commands=commands, notices=other)


def test_wrong_receivers_are_refused_before_anything_starts(home: Path, tmp_path: Path) -> None:
    receivers = tmp_path / "notices.toml"
    receivers.write_text('[[receiver]]\nname = "mail"\ncommand = ["/no/such"]\nkinds = ["x"]\n')
    with pytest.raises(ConfigError, match=r"(?s)there is no kind 'x'.*'/no/such'"):
        local.up(NAME, notices=receivers)
    assert not ClusterFile.home_of(NAME).exists()


def test_wrong_settings_of_the_monitor_are_refused_before_anything_starts(home: Path, tmp_path: Path) -> None:
    settings = tmp_path / "monitor.toml"
    settings.write_text("[gpus]\ninterval_s = 5\n")
    with pytest.raises(ConfigError, match="there is no inspection 'gpus'"):
        local.up(NAME, monitor=settings)
    assert not ClusterFile.home_of(NAME).exists()


def _environment(pid: int) -> dict[str, str]:
    fields = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(field.split("=", 1) for field in fields if "=" in field)


def test_an_invalid_name_is_refused(home: Path) -> None:
    with pytest.raises(ClusterError, match="not a cluster name"):
        local.up("../elsewhere")
    with pytest.raises(ClusterError, match="not a cluster name"):
        local.down("../elsewhere")


def test_clusters_that_start_at_once_have_their_own_servers(home: Path, commands: Commands) -> None:
    names = ["trial-a", "trial-b", "trial-c"]
    with ThreadPoolExecutor() as threads:
        found = list(
            threads.map(lambda name: local.up(name, machines=1, standbys=0, workers=1, commands=commands), names)
        )
    try:
        assert len({one.temporal_address for one in found}) == len({one.ui_url for one in found}) == len(names)
        for one in found:
            server = local.processes(one)["temporal"]
            host, port = parse_address(one.temporal_address)
            assert _listening(server) & {port}, f"{host}:{port} does not belong to the server of {one.name}"
    finally:
        for name in names:
            local.down(name)


def test_the_address_of_a_restarting_process_stays_reserved(home: Path, commands: Commands) -> None:
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, commands=commands)
    hold(cluster.home, "temporal")
    os.kill(local.processes(cluster)["temporal"], signal.SIGKILL)
    host, port = parse_address(cluster.temporal_address)
    assert holds(lambda: ports.is_free(host, port), PATIENCE_S)
    with ports.Claims() as claims:
        assert not claims.claim(host, port)
        assert claims.choose(host, preferred=port).port != port
    local.down(NAME)
    with ports.Claims() as claims:
        assert claims.choose(host, preferred=port).port == port


def _listening(pid: int) -> set[int]:
    return {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN}
