"""Computes how long a restart takes, part by part, from a fault to the end of the first step.

The parts follow each other, as in docs/benchmarks/recovery.md. Parts that do not depend on the size of the state are
measured there. The other parts are the size divided by a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.traffic import BackupPlan

DETECT_S = 0.11
"""From the fault to the incident's first activity (measured, docs/benchmarks/recovery.md)."""
STOP_S = 0.13
"""Stop and decide, without the time in which the kernel frees the memory of ranks (measured, the same page)."""
SILENT_S = 2.0
"""From the loss of a machine until it is noticed (measured, docs/benchmarks/gpu.md)."""
LAUNCH_S = 0.30
"""The store, the forks of all ranks, and their rendezvous on gloo (measured, docs/benchmarks/recovery.md)."""
NCCL_S = 2.7
"""Set-up of NCCL's communicators. NCCL's own log shows 2.6 to 2.8 s for 8 GPUs of a node, without the time to load
kernels (published, NCCL issue 1646). MegaScale reports less than 5 s for 2,048 GPUs."""
FIRST_STEP_S, FIRST_STEP_GPU_S = 0.17, 0.36
"""The first step of a small model (measured, docs/benchmarks/recovery.md and gpu.md)."""
IMPORT_S = 6.7
"""Launch on a machine that has to start a fork server, which imports torch (measured, docs/benchmarks/gpu.md)."""
RESTORE_S = 0.01
"""Restore of a state of 1 MB: the structure is read, and ``load_state_dict`` is called (measured by
benchmarks/plan.py)."""
NEW_SHARE = 2 / 3
"""Share of the state that needs new private memory at a restore to the host's memory: the two moments of Adam."""


@dataclass(frozen=True, slots=True)
class RestartPart:
    """A part of a restart."""

    name: str
    seconds: float
    what: str
    """What happens, and at which rate."""


def plan_restart(load: Load) -> list[RestartPart]:
    """The parts of a restart after a rank died, from own memory."""
    return [
        RestartPart("detect", DETECT_S, "the end of a rank is noticed and reported"),
        *_stop(load),
        _verify(load),
        *_launch(load),
        *_restore(load),
        _first_step(load),
    ]


def plan_replacement(load: Load, backups: BackupPlan | None) -> list[RestartPart]:
    """The parts of a restart after a machine was lost: another machine gets the state of its ranks.

    Args:
        load: The job.
        backups: The traffic of backups. None: there are none, so the state comes from a disk.
    """
    size, hardware = load.machine_bytes, load.hardware
    if backups is None:
        copies = RestartPart("read copies", size / 1e9 / hardware.disk_read_gb_s, "from the disk")
    else:
        copies = RestartPart("fetch copies", backups.seconds, f"backups from the peer, limited by {backups.bound_by}")
    return [
        RestartPart("detect", SILENT_S, "the machine is silent"),
        *_stop(load),
        copies,
        _verify(load),
        RestartPart("import torch", IMPORT_S, "in the fork server of the new machine"),
        *_launch(load),
        *_restore(load),
        _first_step(load),
    ]


def restore_s(load: Load) -> float:
    """Time in which a rank restores its state from its own slot, seconds."""
    return sum(part.seconds for part in _restore(load))


def _stop(load: Load) -> list[RestartPart]:
    """Stop, and the end of the processes: the kernel unmaps every slot that a rank has used, and its own memory."""
    hardware, slots = load.hardware, load.policy.slots * load.state_bytes
    exit_s = slots / load.rate(hardware.unmap_gb_s, traffic=0)
    if load.on_gpu:
        exit_s += slots / (1e9 * hardware.unpin_gb_s)
    else:
        exit_s += load.state_bytes / load.rate(hardware.unmap_gb_s, traffic=0)
    return [
        RestartPart("stop", STOP_S, "all ranks are killed, and the step is chosen"),
        RestartPart("exit", exit_s, f"the kernel unmaps {load.policy.slots} slots of each rank"),
    ]


def _verify(load: Load) -> RestartPart:
    threads = load.hash_threads
    rate = load.rate(load.hardware.verify_gb_s, threads=threads)
    return RestartPart("verify", load.state_bytes / rate, f"agents hash the chosen slots, {_threads(threads)} a slot")


def _launch(load: Load) -> list[RestartPart]:
    parts = [RestartPart("launch", LAUNCH_S, "the store, forks and rendezvous")]
    return [*parts, RestartPart("set up NCCL", NCCL_S, "communicators of all groups")] if load.on_gpu else parts


def _restore(load: Load) -> list[RestartPart]:
    size, threads = load.state_bytes, _threads(load.hash_threads)
    if load.on_gpu:
        pin_s = size / load.rate(load.hardware.pin_gb_s, traffic=0)
        return [
            RestartPart("pin", pin_s, "CUDA pins the slot"),
            RestartPart("hash", size / load.hash_rate, f"the rank hashes the slot, {threads}"),
            RestartPart("copy", size / load.device_rate, f"to the GPU, {load.device_rate / 1e9:.0f} GB/s"),
        ]
    return [
        RestartPart(
            "copy and hash", max(_host_restore_s(load)), f"into private memory, with a helper; hashed by {threads}"
        )
    ]


def _host_restore_s(load: Load) -> tuple[float, float]:
    """Seconds that each thread of a restore to the host takes (``everstep/training/copies/restore_copy.py``).

    The first thread copies and hashes piece by piece. The second one makes pages present, and then copies pieces from
    the end until both meet. The first thread hashes what the second one has copied.
    """
    hardware, size, threads = load.hardware, load.state_bytes, load.hash_threads
    copy_s = size / load.rate(hardware.piece_copy_gb_s, traffic=2)
    cached_s = size / load.rate(hardware.cached_hash_gb_s, threads=threads, traffic=0)
    pages_s = size / load.rate(hardware.map_gb_s, traffic=0) + NEW_SHARE * size / load.rate(hardware.clear_gb_s)
    share = min(1.0, (pages_s + copy_s) / (2 * copy_s + cached_s))
    first_s = RESTORE_S + share * (copy_s + cached_s) + (1 - share) * size / load.hash_rate
    second_s = pages_s + (1 - share) * copy_s
    if load.hardware.cores < 2 * load.ranks:  # the threads share a core
        return first_s + second_s, 0.0
    return first_s, second_s


def _first_step(load: Load) -> RestartPart:
    seconds = FIRST_STEP_GPU_S if load.on_gpu else FIRST_STEP_S
    return RestartPart("first step", seconds, "what the first step takes longer than others")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
