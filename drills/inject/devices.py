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

from agent.main import FAKE_GPUS as FAKE_GPUS_FILE
from agent.monitor.kernel.shared import tag_of
from controlplane.local import mounts, power
from controlplane.local.network import Network
from drills.clusters.network import NetworkCluster
from drills.inject import memory_group
from drills.inject.context import DrillContext
from drills.inject.found import await_finding, await_told
from drills.inject.full_disks import disk_of
from drills.observe.observed import Absorbed
from drills.spec.catalogue import CARDS
from drills.spec.request import DrillRequest
from drills.spec.sure_faults import FAKE_GPUS, GPU, LINES, xid_line
from everstep.errors import CannotInject
from everstep.model.machine import Machine
from everstep.system import private_files as private

GPUS = 8
"""Of a machine, as most have."""
FLAP_S = 0.5
"""A link that flaps is down for so long."""
KERNEL_LOG = Path("/dev/kmsg")
HOT: dict[str, object] = {"temperature_c": 95}
"""Of a GPU that is too hot; 87 degrees is where an H100 slows down."""


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
            for machine in _struck(context):
                _network(context).second_card(machine.name, up=True)
    elif _gpu_fault(context.request) is not None:
        for machine in _struck(context):
            fake_gpus(context, machine.name, {})
        try:
            yield
        finally:
            for machine in _struck(context):
                fake_gpus(context, machine.name, {})  # not removed: GPUs that vanish are a fault too
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
    if context.request.replaces:
        context.planned.let_go()  # its ranks step while another machine is made ready
    if not context.request.then:
        await await_told(context)
    context.seen.absorbed = Absorbed(broken_ns, time.time_ns())


def _break(context: DrillContext) -> None:
    """Break it now.

    Raises:
        CannotInject: this computer does not let us.
    """
    if (gpu := _gpu_fault(context.request)) is not None:
        for machine in _struck(context):
            fake_gpus(context, machine.name, gpu)
        return
    match context.request.base:
        case "xid":
            _write_kernel_lines(context, xid_line(context.request.xid_code))
        case "machine-fault":
            _write_kernel_lines(context, LINES[context.request.reason])
        case "nic-down" | "switch-down":
            for machine in _struck(context):
                _network(context).second_card(machine.name, up=False)
        case "nic-flap":
            _network(context).second_card(context.target.name, up=False)
            time.sleep(FLAP_S)
            _network(context).second_card(context.target.name, up=True)
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


def _gpu_fault(request: DrillRequest) -> dict[str, object] | None:
    """What is wrong with a fake GPU; None: the fault is none of a GPU that is read."""
    if request.base == "gpu-hot":
        return HOT
    return FAKE_GPUS.get(request.reason if request.base == "machine-fault" else request.base)


def _struck(context: DrillContext) -> list[Machine]:
    """The machines on which it breaks."""
    return context.machines if context.request.strikes_all else [context.target]


def fake_gpus(context: DrillContext, machine: str, first: dict[str, object]) -> None:
    """Let a machine have its GPUs, the first one with a fault or none; always as many, for one that is missing is a
    fault too."""
    others: list[dict[str, object]] = [{} for _ in range(max(context.spec.ranks_per_machine, GPUS) - 1)]
    path = power.state_folder(context.cluster.file, machine) / FAKE_GPUS_FILE
    private.replace(path, json.dumps({"gpus": [first, *others]}))


def _write_kernel_lines(context: DrillContext, line: str) -> None:
    """Write a line into the kernel log for each struck machine: its agent takes those that are for it.

    Raises:
        CannotInject: this process may not write there.
    """
    text = line.replace(GPU, _gpu_of(context))
    try:
        for machine in _struck(context):
            tag = tag_of(context.cluster.file.id, machine.name, power.state_folder(context.cluster.file, machine.name))
            KERNEL_LOG.write_text(f"<3>{tag} {text}\n")
    except OSError as error:
        raise CannotInject(f"{KERNEL_LOG} cannot be written ({error.strerror}): it needs root") from error
