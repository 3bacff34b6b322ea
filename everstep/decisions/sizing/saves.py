"""Computes how long a save takes, and by how much it delays training.

The script's thread begins a save; a second thread copies, hashes and commits it (docs/concepts/saves.md). The call of
``optimizer.step`` waits for the copy, and the next save waits for the end of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.keep.save_need import distance
from everstep.decisions.sizing.load import Load

SCRIPT_S = 0.0015
"""Time for which the script's thread begins a save, seconds (measured, docs/benchmarks/checkpoints.md). On a GPU it was
1 to 2 ms (docs/benchmarks/gpu.md)."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The times of saves, seconds, while all ranks of the machine save."""

    script_s: float
    """The script's thread: it begins the save."""
    copy_s: float
    checksum_s: float
    save_s: float
    """From the beginning of a save to its commit."""
    first_s: float
    """The longest save: the first one into a slot, whose memory has to be allocated and mapped, and is not pinned."""
    first_delay_s: float
    """The delay of training by the first save of a job."""
    delay_s: float
    """The delay of training by every other save."""
    step_s: float
    """Mean time of a step, with its share of a save."""
    fits_step: bool
    """Whether no step waits for a save: each save ends before the next one begins, and its copy before
    ``optimizer.step``."""
    every_steps: int
    """The ranks save every n-th step (``save_every_steps``)."""


def plan_saves(load: Load) -> SavePlan:
    """Compute the times of saves."""
    size, hardware = load.state_bytes, load.hardware
    copy_s = size / (load.device_rate if load.on_gpu else load.copy_rate)
    checksum_s = size / load.hash_rate
    save_s = SCRIPT_S + copy_s + checksum_s
    allocate_s = size / load.rate(hardware.allocate_gb_s)
    map_s = size / load.rate(hardware.map_write_gb_s, traffic=0)
    unpinned_s = size / min(load.copy_rate, load.device_rate) if load.on_gpu else copy_s
    overlapped = load.policy.overlap and load.policy.slots > 2
    every = load.policy.save_every_steps or min(distance(save_s, load.step_s), load.policy.most_distance)
    delay_s = _delay_s(load, copy_s, save_s, overlapped, every)
    first_s = SCRIPT_S + allocate_s + map_s + unpinned_s + checksum_s
    first_delay_s = _delay_s(load, allocate_s + map_s + unpinned_s, first_s, overlapped, 1)
    forward_s = load.forward_share * load.step_s
    return SavePlan(
        script_s=SCRIPT_S,
        copy_s=copy_s,
        checksum_s=checksum_s,
        save_s=save_s,
        first_s=first_s,
        first_delay_s=first_delay_s,
        delay_s=delay_s,
        step_s=load.step_s + delay_s / every,
        fits_step=overlapped and copy_s <= forward_s and save_s <= every * load.step_s,
        every_steps=every,
    )


def _delay_s(load: Load, until_copied_s: float, save_s: float, overlapped: bool, every: int) -> float:
    """Time for which training waits for a save that takes ``save_s``, seconds.

    Args:
        load: The job.
        until_copied_s: Time from the begin of the save until the state is copied, seconds.
        save_s: Time of the save, seconds.
        overlapped: Whether training continues meanwhile.
        every: The next save begins after so many steps.
    """
    if not overlapped:
        return save_s
    waits_s = max(until_copied_s - load.forward_share * load.step_s, 0.0)
    return max(waits_s, save_s - SCRIPT_S - every * load.step_s) + SCRIPT_S
