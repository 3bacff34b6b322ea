"""Each check of an agent's setup: what it says where a need is met, where it is not, and where that is not known."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import needs
from agent.needs import StartedBy
from agent.setup import checks
from everstep.errors import CannotInspect, Lacks
from everstep.system import memory, procfs
from tests.capabilities import in_container, in_unit, needs_root

Start = Callable[..., list[str]]
"""Makes the command that starts a program with some capabilities."""
UNREADABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); input()"
"""A process that only CAP_SYS_PTRACE can read, as a rank is where Yama restricts ptrace (PR_SET_DUMPABLE)."""
TRIES = f"""
import json
from everstep.errors import Lacks
from agent.setup.checks import ptrace
from everstep.system.capabilities import keep_from_children
keep_from_children()
try:
    print(json.dumps(["healthy", ptrace({UNREADABLE!r})]))
except Lacks as lack:
    print(json.dumps(["lacks", lack.problem, lack.remedy]))
"""


@pytest.fixture(autouse=True)
def by_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "started_by", lambda: StartedBy.UNIT)


def tried(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_stacks_of_an_ordinary_process_can_be_read() -> None:
    assert checks.ptrace() == "py-spy can read the stacks of processes"


@needs_root
@pytest.mark.parametrize("start", [in_container, in_unit], ids=["container", "unit"])
def test_the_capability_decides_whether_stacks_of_a_protected_process_can_be_read(start: Start) -> None:
    program = [sys.executable, "-P", "-c", TRIES]

    name, problem, remedy = tried(start(program, "syslog"))
    assert (name, problem) == ("lacks", "py-spy may not read the stacks of a process")
    assert remedy in {needs.PTRACE.remedy(runs) for runs in StartedBy}
    assert tried(start(program, "sys_ptrace")) == ["healthy", "py-spy can read the stacks of processes"]


def test_without_py_spy_nothing_is_known_about_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "py_spy", lambda: None)

    with pytest.raises(CannotInspect, match="py-spy is not installed") as error:
        checks.ptrace()

    assert not isinstance(error.value, Lacks)


def test_a_container_without_the_device_lacks_the_kernel_log(tmp_path: Path) -> None:
    with pytest.raises(Lacks) as lack:
        checks.kernel_log(tmp_path / "kmsg")

    assert lack.value.problem == f"{tmp_path}/kmsg cannot be read (No such file or directory)"
    assert str(lack.value).endswith("; add to [Service] of the agent's unit: AmbientCapabilities=CAP_SYSLOG")


@pytest.mark.parametrize(("adjustment", "is_met"), [("-900", True), ("0", False), ("500", False)])
def test_an_agent_that_is_not_spared_lacks_protection(
    adjustment: str, is_met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/oom_score_adj").write_text(f"{adjustment}\n")
    monkeypatch.setattr(procfs, "PROC", tmp_path)

    if is_met:
        assert checks.oom_score() == f"oom_score_adj of the agent is {adjustment}"
    else:
        with pytest.raises(Lacks, match=f"is {adjustment}; .*: OOMScoreAdjust=-900"):
            checks.oom_score()


def test_a_cgroup_that_is_killed_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/pod/agent\n")
    group = tmp_path / "cgroup/pod/agent"
    group.mkdir(parents=True)
    (group / "memory.oom.group").write_text("0\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(needs, "unit", str)
    assert checks.oom_group() == "a rank is killed alone"

    (group.parent / "memory.oom.group").write_text("1\n")

    with pytest.raises(Lacks, match=f"memory.oom.group is 1 in {group.parent}"):
        checks.oom_group()


@pytest.mark.parametrize(("policy", "is_met"), [("continue", True), ("stop", False), ("kill", False), ("", True)])
def test_a_unit_that_systemd_stops_when_a_rank_is_killed(
    policy: str, is_met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\ntest "$2" = everstep-agent.service && echo {policy}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(needs, "unit", lambda: "everstep-agent.service")
    monkeypatch.setattr(checks, "is_killed_as_group", str)

    if is_met:
        assert checks.oom_group() == "a rank is killed alone"
    else:
        with pytest.raises(Lacks, match=f"OOMPolicy of everstep-agent.service is {policy}; .*: OOMPolicy=continue"):
            checks.oom_group()


def test_shared_memory_of_a_container_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "started_by", lambda: StartedBy.DOCKER)
    monkeypatch.setattr(checks, "SHM_WANTED", 1 << 60)

    with pytest.raises(Lacks, match=r"shared memory has .*; add to docker run: --shm-size="):
        checks.shared_memory(Path("/dev/shm"))


def test_locked_memory_matters_with_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(checks, "has", lambda _: False)
    assert "without InfiniBand and RoCE" in checks.memlock(tmp_path)
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)

    with pytest.raises(Lacks, match=r"only 8.4 MB of memory may be locked; .*: LimitMEMLOCK=infinity"):
        checks.memlock(tmp_path)

    monkeypatch.setattr(checks, "has", lambda _: True)
    assert checks.memlock(tmp_path) == "any amount of memory may be locked"


def test_device_files_of_infiniband(tmp_path: Path) -> None:
    sys_folder, dev = tmp_path / "sys", tmp_path / "dev"
    assert checks.rdma(sys_folder, dev) == "the machine has no InfiniBand or RoCE device"
    (sys_folder / "class/infiniband/mlx5_0").mkdir(parents=True)
    with pytest.raises(Lacks, match="the machine has mlx5_0, but no file in"):
        checks.rdma(sys_folder, dev)
    (dev / "infiniband").mkdir(parents=True)
    (dev / "infiniband/uverbs0").touch()

    assert checks.rdma(sys_folder, dev) == "device files of InfiniBand or RoCE can be opened"


def test_gpus_that_a_container_may_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's file is visible in a container, but the container has no library of NVML."""
    monkeypatch.setattr(needs, "started_by", lambda: StartedBy.KUBERNETES)
    assert checks.gpus(tmp_path, tmp_path, tmp_path) == "the machine has no NVIDIA GPU"
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Kernel Module  580.65\n")

    with pytest.raises(Lacks, match=r"but NVML cannot be used: .*; .*in Kubernetes: resources: "):
        checks.gpus(tmp_path, tmp_path, tmp_path)


def test_the_network_of_the_agent_and_names_that_no_interface_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert checks.network("127.0.0.1") == "gloo and NCCL use lo, unless a variable names another interface"
    with pytest.raises(Lacks, match=r"no interface of the machine has the agent's address 192\.0\.2\.1; "):
        checks.network("192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "=lo")

    with pytest.raises(Lacks, match="=lo names no interface of the machine; correct GLOO_SOCKET_IFNAME"):
        checks.network("127.0.0.1")


def test_a_clock_that_no_service_synchronizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_synced", lambda: True)
    assert checks.clock() == "a time service synchronizes the clock"
    monkeypatch.setattr(checks, "is_synced", lambda: False)

    with pytest.raises(Lacks, match="on the machine: timedatectl set-ntp true"):
        checks.clock()
