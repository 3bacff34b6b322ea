"""Clocks and power limits of GPUs: EUD was seen to leave them changed (ByteRobust, section 9), so they are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.monitor import programs
from everstep.errors import CannotLook

COMMAND = "nvidia-smi"
ANSWER_S = 15.0
"""``nvidia-smi`` has this long to end, seconds (ours)."""
QUERY = ("index", "clocks.applications.graphics", "clocks.applications.memory", "power.limit", "persistence_mode")


@dataclass(frozen=True, slots=True)
class GpuClocks:
    """How one GPU is set, as ``nvidia-smi`` writes it; what it does not support is ``[N/A]``."""

    graphics: str
    memory: str
    power: str
    persistence: str


def read_clocks(command: str = COMMAND) -> dict[str, GpuClocks]:
    """Number of each GPU → how it is set.

    Raises:
        CannotLook: it cannot be read.
    """
    words = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    ran = programs.run(words, ANSWER_S)
    rows = [[part.strip() for part in line.split(",")] for line in ran.output.splitlines() if line.strip()]
    if ran.code or any(len(row) != len(QUERY) for row in rows):
        raise CannotLook(f"{command} does not say how the GPUs are set: {' '.join(ran.output.split())[:200]}")
    return {row[0]: GpuClocks(*row[1:]) for row in rows}


def restore_clocks(before: Mapping[str, GpuClocks], lock: str = "", command: str = COMMAND) -> list[str]:
    """Set GPUs as they were, where that is not how they are now.

    Args:
        before: How they were.
        lock: ``LOWEST,HIGHEST`` in MHz to which the site locks clocks: set anew, for it cannot be read. Empty: it
            does not.
        command: The program.

    Returns:
        What is still other than it was.

    Raises:
        CannotLook: it cannot be read.
    """
    if lock:
        _set(command, "-lgc", lock)
    for number, (was, now) in _changed(before, read_clocks(command)).items():
        for differs, *words in (
            (was.persistence != now.persistence, "-pm", "1" if was.persistence == "Enabled" else "0"),
            (was.power != now.power, "-pl", was.power),
            ((was.graphics, was.memory) != (now.graphics, now.memory), "-ac", f"{was.memory},{was.graphics}"),
        ):
            if differs:
                _set(command, "-i", number, *words)
    left = _changed(before, read_clocks(command))
    return [f"GPU {number}: {was} before the test, {now} after it" for number, (was, now) in left.items()]


def _changed(before: Mapping[str, GpuClocks], after: Mapping[str, GpuClocks]) -> dict[str, tuple[GpuClocks, GpuClocks]]:
    return {number: (was, after[number]) for number, was in before.items() if after.get(number, was) != was}


def _set(command: str, *words: str) -> None:
    programs.run([command, *words], ANSWER_S)
