"""Settings of a drill's job that the user did not choose: policies, checkpoints, and the number and length of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.decisions.keep.placement import Placement, place_backups
from everstep.model.eviction import EvictMode
from everstep.model.job import JobSpec

QUICK = {"hang.floor_s": 4.0, "stop.exit_grace_s": 3.0}
"""A quick policy for steps of 0.1 s. By default a hang counts after 10 min, and ranks that exit early after 60 s."""
PATIENT = {"hang.floor_s": 60.0, "hang.idle_floor_s": 60.0, "stop.exit_grace_s": 3.0}
"""A patient policy for a job that waits at a step until the drill is done."""
WAITING = {"hang.idle_floor_s": 600.0}
"""A policy for a job in which a rank waits for the drill and the other ranks wait for that rank, which is no hang."""
RETURNS = {"silence.evict_s": 30.0}
"""Machines that come back within this time are not replaced, even on a busy computer; the default is 2 s."""
NO_EVICTION: dict[str, Any] = {"evict.mode": EvictMode.SHADOW}
"""A policy that evicts no machine, for a second fault on the machine at fault."""
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
"""Short diagnostic tests. Bandwidths do not count, since all machines share the few cores of one computer."""
SHORT_REPLAY: dict[str, Any] = {"replay.steps": 3, "replay.timeout_s": 120.0}
"""Short replays."""
SLOW_AT = 200
"""Number of steps before a slowdown, so that everstep knows the job's pace (five samples of 32 steps)."""
SLOW_STEPS = 300
"""Number of steps after a slowdown begins, until it was detected, voted on and seen to end."""
SLOW_STEP_S = 0.1
"""Length of a step before the slowdown, seconds."""
SLOW_POLICY: dict[str, Any] = (
    WAITING | RETURNS | SHORT_TESTS | {"slow.after_s": 1.0, "slow.round_s": 4.0, "hang.floor_s": 60.0}
)
"""A vote of 20 s in rounds of 4 s; the default is 50 s. In rounds of 2 s, a busy computer takes only four samples, too
few to show which rank the others wait for."""
DRILL_POLICY = QUICK | RETURNS | SHORT_TESTS
"""The default policy of a drill's job."""
PATIENT_POLICY = PATIENT | RETURNS | SHORT_TESTS
"""The policy of a job that waits at a step until the drill is done."""
SILENT_S = 15.0
"""Time for which an agent stays away, seconds: longer than ``silence.detect_s`` and some polls."""
SILENT_STEPS = 170
"""Number of steps, each of ``STEP_S``, that a job makes until an agent that stayed away is back."""
REPLACED_STEPS = 40
"""Number of steps, each of ``STEP_S``, that a job makes while a faulty machine is replaced."""
STEP_S = 0.2
"""Length of a step, seconds: long enough for the backup of the previous step."""
STEPS_AGAIN = 5
"""A job has recovered once it is this many steps past the step of the fault; the fault may strike two steps late."""
DISK_EVERY = 5
"""Number of steps between checkpoints on disk."""


def disk_settings(disk: Path) -> dict[str, Any]:
    """Return fields of the checkpoint policy, so that all machines write to one folder that outlives them."""
    return {"disk_every_steps": DISK_EVERY, "disk_path": str(disk)}


def placement_of(spec: JobSpec) -> Placement:
    """Return the placement of a job's backups on a local cluster, which has no failure domains."""
    topology = spec.topology()
    if spec.checkpoint.backup:
        return place_backups(topology)
    return Placement((None,) * topology.world_size, involution=False, shared=(), reason="the job has no backups")


def machine_names(count: int) -> list[str]:
    """Return the names of a local cluster's machines, without standbys."""
    return [f"m{index}" for index in range(count)]
