"""This module lists what an agent needs of its machine or container, what is lost without it, and how to provide it.

Inspections, the tracer, ``everstep doctor`` and the documentation all take the lines from this table. The unit
``deploy/systemd/everstep-agent.service`` has all lines for systemd.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

from everstep.errors import Lacks
from everstep.system import procfs

UNIT = re.compile(r"/system\.slice/(?:.*/)?(?P<name>[^/]+\.service)(?:/|$)")
"""The cgroup of a service of systemd."""
CONTAINER_FILES = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that docker and podman make in a container."""


class StartedBy(StrEnum):
    """What started the agent, and so where a line has to be added."""

    UNIT = "systemd"
    DOCKER = "docker"
    KUBERNETES = "Kubernetes"
    SHELL = "a shell"


WHERE = {
    StartedBy.UNIT: "add to [Service] of the agent's unit",
    StartedBy.DOCKER: "add to docker run",
    StartedBy.KUBERNETES: "add to the container in Kubernetes",
    StartedBy.SHELL: "on the machine",
}
"""What started the agent → where its line belongs."""


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """Something that an agent needs."""

    name: str
    """Name of the check of ``everstep doctor``; it does not change from release to release."""
    means: str
    """What is needed, for a person."""
    without: str
    """What is lost without it."""
    machine: str
    """What to do on the machine, whatever started the agent; the only way where ``lines`` has no better one."""
    lines: Mapping[StartedBy, str] = field(default_factory=dict)
    """What started the agent → the line that provides it."""

    def remedy(self, runs: StartedBy | None = None) -> str:
        """Return what to do, in one line.

        Args:
            runs: What started the agent; by default, what started this process.
        """
        runs = runs or started_by()
        runs = runs if runs in self.lines else StartedBy.SHELL
        return f"{WHERE[runs]}: {self.lines.get(runs, self.machine)}"

    def lacked(self, problem: str, remedy: str = "") -> Lacks:
        """Return the error that the agent lacks this; by default, with the usual remedy."""
        return Lacks(problem, remedy or self.remedy())


KERNEL_LOG = Need(
    "kernel-log",
    "the right to read the kernel log, `/dev/kmsg`",
    "faults that only the kernel reports are not detected: Xids, disks, memory, file systems, network cards",
    "sysctl -w kernel.dmesg_restrict=0",
    {
        StartedBy.UNIT: "AmbientCapabilities=CAP_SYSLOG",
        StartedBy.DOCKER: "--user 0 --cap-add SYSLOG --device /dev/kmsg",
        # The kubelet gives a device of the machine to a privileged container only.
        StartedBy.KUBERNETES: "securityContext: {runAsUser: 0, privileged: true}",
    },
)
PTRACE = Need(
    "ptrace",
    "the right to read the stacks of ranks",
    "a hang has no stacks, so the machine at fault is found less often, and slow machines are not found",
    "sysctl -w kernel.yama.ptrace_scope=0",
    {
        StartedBy.UNIT: "AmbientCapabilities=CAP_SYS_PTRACE",
        StartedBy.DOCKER: "--user 0 --cap-add SYS_PTRACE",
        StartedBy.KUBERNETES: "securityContext: {runAsUser: 0, capabilities: {add: [SYS_PTRACE]}}",
    },
)
OOM_SCORE = Need(
    "oom-score",
    "protection of the agent when memory is used up; it does not protect ranks",
    "the kernel may kill the agent instead of the rank that uses the memory",
    "run as root: echo -900 > /proc/PID/oom_score_adj, with the agent's process id",
    {
        StartedBy.UNIT: "OOMScoreAdjust=-900",
        StartedBy.DOCKER: "--oom-score-adj=-900",
        StartedBy.KUBERNETES: "resources: {requests: as limits}, for CPU and memory (class Guaranteed)",
    },
)
OOM_GROUP = Need(
    "oom-group",
    "a rank that is killed for its memory is killed alone",
    "the agent and all ranks of the machine end with it",
    "write 0 to memory.oom.group of the agent's cgroup",
    {
        StartedBy.UNIT: "OOMPolicy=continue",
        StartedBy.KUBERNETES: "singleProcessOOMKill: true, in the configuration of the kubelet (1.32 or newer)",
    },
)
SHARED_MEMORY = Need(
    "shared-memory",
    "`/dev/shm` with room for the checkpoints; a container has 64 MB by default",
    "there are no checkpoints in memory: ranks cannot be started, or resume from older copies on disks",
    "mount -o remount,size=50% /dev/shm",
    {
        StartedBy.DOCKER: "--shm-size=64g, or as much as the checkpoints need",
        StartedBy.KUBERNETES: "volumeMounts: [{name: shm, mountPath: /dev/shm}]; "
        "the pod needs volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 64Gi}}]",
    },
)
MEMLOCK = Need(
    "memlock",
    "unlimited locked memory, on machines with InfiniBand or RoCE",
    "NCCL cannot register memory for RDMA, so jobs fail or communicate slowly",
    "ulimit -l unlimited",
    {
        StartedBy.UNIT: "LimitMEMLOCK=infinity",
        StartedBy.DOCKER: "--ulimit memlock=-1",
        StartedBy.KUBERNETES: "securityContext: {runAsUser: 0, capabilities: {add: [IPC_LOCK]}}",
    },
)
GPUS = Need(
    "gpus",
    "access to the GPUs and to NVML, NVIDIA's management library",
    "faults of GPUs are detected by the kernel log alone, or not at all",
    "nvidia-smi must list the GPUs for the agent's user",
    {
        StartedBy.DOCKER: "--gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        StartedBy.KUBERNETES: "resources: {limits: {nvidia.com/gpu: 8}}, with the number of GPUs",
    },
)
NETWORK = Need(
    "network",
    "the machine's own network, with the address of `EVERSTEP_LISTEN`",
    "gloo and NCCL may choose an interface that other machines cannot reach",
    "give EVERSTEP_LISTEN the address of an interface of this machine",
    {
        StartedBy.DOCKER: "--network host, and EVERSTEP_LISTEN with an address of the machine",
        StartedBy.KUBERNETES: "hostNetwork: true, in the pod, and EVERSTEP_LISTEN with an address of the machine",
    },
)
RDMA = Need(
    "rdma",
    "the device files of InfiniBand and RoCE",
    "NCCL uses TCP, which is much slower",
    "the agent's user must be able to open /dev/infiniband/uverbs*",
    {
        StartedBy.DOCKER: "--device /dev/infiniband",
        StartedBy.KUBERNETES: "resources: {limits: {rdma/hca: 1}}, or the name that your device plugin has",
    },
)
PORTS = Need(
    "ports",
    "the other agents can be reached on all ports",
    "ranks cannot meet each other, and copies of the training state cannot be sent",
    "open all TCP ports from 1024 on between the machines of the cluster",
)
CLOCK = Need(
    "clock",
    "a time service that synchronizes the clock",
    "times of several machines cannot be compared, and certificates may not be valid",
    "timedatectl set-ntp true",
)
NEEDS = (KERNEL_LOG, PTRACE, OOM_SCORE, OOM_GROUP, SHARED_MEMORY, MEMLOCK, GPUS, NETWORK, RDMA, PORTS, CLOCK)
"""All needs, in the order in which they are shown."""


@cache
def unit() -> str:
    """Return the name of the systemd unit of this process; empty: it is in none."""
    found = (UNIT.search(name) for _, name in procfs.cgroups())
    return next((match["name"] for match in found if match), "")


@cache
def started_by() -> StartedBy:
    """Return what started this process."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return StartedBy.KUBERNETES
    if "container" in os.environ or any(file.exists() for file in CONTAINER_FILES):
        return StartedBy.DOCKER
    return StartedBy.UNIT if unit() else StartedBy.SHELL
