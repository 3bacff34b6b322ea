"""What a drill sets in its job where the user chose nothing: patience, checkpoints, length of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.decisions.keep.placement import Placement, place_backups
from everstep.model.eviction import EvictMode
from everstep.model.job import JobSpec

GONE_POLICY = {"hang.floor_s": 4.0, "stop.exit_grace_s": 3.0}
"""Hangs are found after 10 min, and early leavers after 60 s, by default; a drill's steps take 0.1 s."""
GONE_PATIENT = {"hang.floor_s": 60.0, "hang.idle_floor_s": 60.0, "stop.exit_grace_s": 3.0}
"""The same for a job that waits at a step until the drill has done what it wants to do."""
HELD = {"hang.idle_floor_s": 600.0}
"""For a job in which one rank waits for the drill, and the others for that one."""
BACK = {"silence.evict_s": 30.0}
"""Machines that are lost and come back are back within this time, on a busy computer too: no other takes their place
(the default is 2 s)."""
NOBODY_LEAVES: dict[str, Any] = {"evict.mode": EvictMode.SHADOW}
"""For a job whose machine is at fault and that is struck once more there."""
SHORT_TESTS: dict[str, Any] = {
    "diagnose.settings": {
        "memory": {"mb": 16, "seconds": 0.5},
        "disk": {"mb": 16},
        "loopback": {"seconds": 0.1, "mb": 16},
        "all-to-all": {"mb": 1, "rounds": 2},
        "bitwise": {"seconds": 0.5, "dim": 32, "layers": 2},
        "all-gather": {"mb": 1, "rounds": 2},
        "nic": {"seconds": 0.2, "mb": 64},
    },
    "diagnose.slow_share": 0.0,
}
"""Diagnostic tests of a drill's job: all machines are one computer, whose few cores they share, so that their
bandwidths say nothing."""
SHORT_REPLAY: dict[str, Any] = {"replay.steps": 3, "replay.timeout_s": 120.0}
"""Replays of a drill."""
SLOW_AT = 200
"""A job whose steps become slower has to have made so many before, to know it (five looks of 32 steps)."""
SLOW_STEPS = 300
"""Steps after that, until it was noticed, voted on and seen to be faster again."""
SLOW_STEP_S = 0.1
"""How long they are made to last before."""
SLOW_POLICY: dict[str, Any] = (
    HELD | BACK | SHORT_TESTS | {"slow.after_s": 1.0, "slow.round_s": 4.0, "hang.floor_s": 60.0}
)
"""A vote of twenty seconds, for steps of a tenth of a second (by default it has 50 s): in rounds of two seconds a
busy computer leaves four looks, which are too few to tell whom the others wait for."""
DRILL_POLICY = GONE_POLICY | BACK | SHORT_TESTS
PATIENT_POLICY = {"hang.floor_s": 60.0, "hang.idle_floor_s": 60.0, "stop.exit_grace_s": 3.0} | BACK | SHORT_TESTS
"""For a job that waits at a step until the drill has done what it wants to do."""
SILENT_S = 15.0
"""An agent that stays away does so for longer than ``silence.detect_s``, and for some looks more."""
SILENT_STEPS = 170
"""Steps of ``STEP_S`` in which an agent stays away and comes back."""
REPLACED_STEPS = 40
"""Steps of ``STEP_S`` in which a machine that was found faulty is replaced while its ranks step."""
STEP_S = 0.2
"""A step must be long enough for the backup of the step before."""
STEPS_AGAIN = 5
"""A job that is so many steps beyond the step of the fault has recovered: it is struck within two of them."""
DISK_EVERY = 5
"""Steps between checkpoints on disk, where a drill needs some."""


def disk_settings(disk: Path) -> dict[str, Any]:
    """Fields of the checkpoint policy with which all machines write to one folder that outlives them."""
    return {"disk_every_steps": DISK_EVERY, "disk_path": str(disk)}


def placement_of(spec: JobSpec) -> Placement:
    """Where the backups of a job lie on a local cluster, which names no failure domains."""
    topology = spec.topology()
    if spec.checkpoint.backup:
        return place_backups(topology)
    return Placement((None,) * topology.world_size, involution=False, shared=(), reason="the job has no backups")


def machine_names(count: int) -> list[str]:
    """Names of a local cluster's machines, without its standbys."""
    return [f"m{index}" for index in range(count)]
