"""Clocks and power limits of GPUs: EUD was seen to leave them changed (ByteRobust, section 9), so they are compared.

They are kept in a file from before a diagnostic until they are set back: it may be killed at any moment, and the agent
with it. The agent that killed it sets them back, or the next agent as it starts.
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
    "a diagnostic left a GPU with other clocks, and they could not be set back",
    remedy=Remedy.RESET_GPU,
    verdict=Health.UNKNOWN,
    source="ByteRobust, section 9",
)
KEPT = "gpu-clocks.json"
"""The file."""
COMMAND = "nvidia-smi"
ANSWER_S = 15.0
"""``nvidia-smi`` has this long to end, seconds."""
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
        CannotInspect: it cannot be read.
    """
    words = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    ran = programs.run(words, ANSWER_S)
    rows = [[part.strip() for part in line.split(",")] for line in ran.output.splitlines() if line.strip()]
    if ran.code or any(len(row) != len(QUERY) for row in rows):
        raise CannotInspect(f"{command} does not say how the GPUs are set: {' '.join(ran.output.split())[:200]}")
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
        CannotInspect: it cannot be read.
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
    """Write how GPUs are set before a diagnostic; what an earlier one left to be set back stays.

    Args:
        folder: Of the file.
        before: How they are set.
        lock: As of :func:`restore_clocks`.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / KEPT
    if not path.exists():
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"before": {gpu: asdict(clocks) for gpu, clocks in before.items()}, "lock": lock}))
        beside.replace(path)


def are_kept(folder: Path) -> bool:
    """Whether a diagnostic has not set the clocks back."""
    return (folder / KEPT).exists()


def set_back(folder: Path, test: str, command: str = COMMAND) -> list[Finding]:
    """Set GPUs as they were before a diagnostic, if it did not do so itself.

    Args:
        folder: Of the file; it is gone after this, unless the GPUs cannot be asked.
        test: The test that reports it.
        command: The program.

    Returns:
        What is found where that does not go.
    """
    path = folder / KEPT
    try:
        kept = json.loads(path.read_text())
        before = {gpu: GpuClocks(**one) for gpu, one in kept["before"].items()}
        left = restore_clocks(before, kept["lock"], command)
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        return []
    except (CannotInspect, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [CLOCKS.finding(test, text=f"whether GPUs have other clocks than before is not known: {error}")]
    return [CLOCKS.finding(test, "", *left)] if left else []
