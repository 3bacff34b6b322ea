"""Devices of a machine that break, so that its inspections have something to find."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from agent.main import FAKE_GPUS
from controlplane.local import mounts, power
from controlplane.local.network import Network
from drills.clusters.network import NetworkCluster
from drills.inject import memory_group
from drills.inject.context import DrillContext
from drills.inject.found import await_finding, await_told
from drills.inject.full_disks import disk_of
from drills.observe.observed import Absorbed
from drills.spec.catalogue import CARDS
from everstep import private
from everstep.errors import CannotInject

GPUS = 8
"""Of a machine, as most have (ours)."""
FLAP_S = 0.5
"""A link that flaps is down for so long (ours)."""
KERNEL_LOG = Path("/dev/kmsg")
FAKE_FAULTS: dict[str, dict[str, object]] = {"gpu-lost": {"lost": True}, "gpu-hot": {"temperature_c": 95}}
"""What is wrong with a fake GPU (``agent.monitor.gpu.fake``), by fault; 87 degrees is where an H100 slows down."""
FALLEN_OFF = "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@contextlib.contextmanager
def prepared(context: DrillContext) -> Iterator[None]:
    """What has to be there before the job starts, for something to break; nothing for other faults."""
    if context.request.base == "fs-readonly":
        with mounts.small(disk_of(context), 1 << 30):
            yield
    elif context.request.base in CARDS:
        try:
            yield
        finally:
            _network(context).second_card(context.target.name, up=True)
    elif context.request.base in FAKE_FAULTS:
        _fake_gpus(context, {})
        try:
            yield
        finally:
            _fake_gpus(context, {})  # not removed: GPUs that vanish are a fault too
    elif context.request.base == "oom":
        with memory_group.small_group():
            yield
    else:
        yield


def why_not() -> str:
    """Why no line can be written into the kernel log; empty: it can."""
    return "" if os.access(KERNEL_LOG, os.W_OK) else f"{KERNEL_LOG} cannot be written: it needs root"


async def break_device(context: DrillContext) -> None:
    """Break it once the job has come to the step, and wait until that is found and told."""
    await context.reach(context.request.at_step)
    broken_ns = time.time_ns()
    await asyncio.to_thread(_break, context)
    context.mark(context.request.base, time_ns=broken_ns)
    await await_finding(context)
    if not context.request.then:
        await await_told(context)
    context.seen.absorbed = Absorbed(broken_ns, time.time_ns())


def _break(context: DrillContext) -> None:
    """Break it now.

    Raises:
        CannotInject: this computer does not let us.
    """
    match context.request.base:
        case "xid":
            code = context.request.xid_code
            rest = FALLEN_OFF if code == 79 else "injected"
            write_kernel_line(context, f"NVRM: Xid (PCI:{_gpu_of(context)}): {code}, {rest}")
        case "nic-down":
            _network(context).second_card(context.target.name, up=False)
        case "nic-flap":
            _network(context).second_card(context.target.name, up=False)
            time.sleep(FLAP_S)
            _network(context).second_card(context.target.name, up=True)
        case "gpu-lost" | "gpu-hot" as base:
            _fake_gpus(context, FAKE_FAULTS[base])
        case "fs-readonly":
            mounts.remount(disk_of(context), read_only=True)
        case other:
            raise CannotInject(f"{other}: nothing here injects it")


def _network(context: DrillContext) -> Network:
    """The machines' network.

    Raises:
        CannotInject: they have none of their own.
    """
    if not isinstance(context.cluster, NetworkCluster):
        raise CannotInject(f"{context.request.base}: the machines of this cluster have no network of their own")
    return context.cluster.network


def _gpu_of(context: DrillContext) -> str:
    """A GPU that no drill before had: what it finds is its own."""
    return f"0000:{zlib.crc32(context.spec.name.encode()) % 256:02x}:00"


def _fake_gpus(context: DrillContext, first: dict[str, object]) -> None:
    """Let the machine have its GPUs, the first one with a fault or none; always as many, for one that is missing is a
    fault too."""
    others: list[dict[str, object]] = [{} for _ in range(max(context.spec.ranks_per_machine, GPUS) - 1)]
    path = power.state_folder(context.cluster.file, context.target.name) / FAKE_GPUS
    private.replace(path, json.dumps({"gpus": [first, *others]}))


def write_kernel_line(context: DrillContext, text: str) -> None:
    """Write a line into the kernel log, for the agent of the struck machine only.

    Raises:
        CannotInject: this process may not write there.
    """
    tag = f"everstep {context.cluster.file.id}/{context.target.name}"
    try:
        KERNEL_LOG.write_text(f"<3>{tag}: {text}\n")
    except OSError as error:
        raise CannotInject(f"{KERNEL_LOG} cannot be written ({error.strerror}): it needs root") from error
