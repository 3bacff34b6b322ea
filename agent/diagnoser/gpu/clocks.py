"""This module restores the clocks and power limits of GPUs, which NVIDIA's EUD may change (ByteRobust, section 9).

The settings are saved in a file before a diagnostic, and the file is kept until they are restored. If the diagnostic is
killed, the agent restores the settings. If the agent is killed too, the next agent restores them when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.monitor import programs
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, Reason, Remedy

CLOCKS = Reason(
    "clocks-changed",
    "a diagnostic changed the clocks of a GPU, and they could not be restored",
    remedy=Remedy.RESET_GPU,
    verdict=Health.UNKNOWN,
    source="ByteRobust, section 9",
)
KEPT = "gpu-clocks.json"
"""Name of the file."""
COMMAND = "nvidia-smi"
ANSWER_S = 15.0
"""Longest time that ``nvidia-smi`` may take, seconds."""
QUERY = ("index", "clocks.applications.graphics", "clocks.applications.memory", "power.limit", "persistence_mode")


@dataclass(frozen=True, slots=True)
class GpuClocks:
    """The settings of one GPU as ``nvidia-smi`` prints them; ``[N/A]``: the GPU does not support the setting."""

    graphics: str
    memory: str
    power: str
    persistence: str


def read_clocks(command: str = COMMAND) -> dict[str, GpuClocks]:
    """Return the settings of each GPU by its number.

    Raises:
        CannotInspect: the settings cannot be read.
    """
    words = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    ran = programs.run(words, ANSWER_S)
    rows = [[part.strip() for part in line.split(",")] for line in ran.output.splitlines() if line.strip()]
    if ran.code or any(len(row) != len(QUERY) for row in rows):
        raise CannotInspect(f"{command} does not report the clocks of the GPUs: {programs.excerpt(ran.output)}")
    return {row[0]: GpuClocks(*row[1:]) for row in rows}


def restore_clocks(before: Mapping[str, GpuClocks], lock: str = "", command: str = COMMAND) -> list[str]:
    """Restore settings of GPUs that have changed.

    Args:
        before: The settings to restore.
        lock: ``LOWEST,HIGHEST`` in MHz to which the site locks clocks. ``nvidia-smi`` does not report this lock, so it
            is always set again. Empty: the site does not lock clocks.
        command: Name of ``nvidia-smi``.

    Returns:
        A description of each GPU whose settings still differ.

    Raises:
        CannotInspect: the settings cannot be read.
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


def keep_clocks(folder: Path, before: Mapping[str, GpuClocks], lock: str = "") -> None:
    """Save the settings of GPUs before a diagnostic, unless a file with settings that were not restored yet exists.

    Args:
        folder: Folder of the file.
        before: The settings.
        lock: See :func:`restore_clocks`.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / KEPT
    if not path.exists():
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"before": {gpu: asdict(clocks) for gpu, clocks in before.items()}, "lock": lock}))
        beside.replace(path)


def are_kept(folder: Path) -> bool:
    """Return whether saved settings have not been restored yet."""
    return (folder / KEPT).exists()


def set_back(folder: Path, test: str, command: str = COMMAND) -> list[Finding]:
    """Restore the saved settings of GPUs, and remove the file unless that fails.

    Args:
        folder: Folder of the file.
        test: Name of the test that the findings belong to.
        command: Name of ``nvidia-smi``.

    Returns:
        Findings about settings that could not be restored.
    """
    path = folder / KEPT
    try:
        kept = json.loads(path.read_text())
        before = {gpu: GpuClocks(**clocks) for gpu, clocks in kept["before"].items()}
        left = restore_clocks(before, kept["lock"], command)
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        return []
    except (CannotInspect, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [CLOCKS.finding(test, text=f"it is not known whether the clocks of GPUs are restored: {error}")]
    return [CLOCKS.finding(test, "", *left)] if left else []
