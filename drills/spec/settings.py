"""Settings of a drill's job for which the user chose no value: patience, checkpoints, length of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.decisions.keep.placement import Placement, place_backups
from everstep.model.eviction import EvictMode
from everstep.model.job import JobSpec

GONE_POLICY = {"hang.floor_s": 4.0, "stop.exit_grace_s": 3.0}
"""A quick policy for steps of 0.1 s: by default hangs count after 10 min, and ranks that exit early after 60 s."""
GONE_PATIENT = {"hang.floor_s": 60.0, "hang.idle_floor_s": 60.0, "stop.exit_grace_s": 3.0}
"""A patient policy for a job that waits at a step until the drill is done."""
HELD = {"hang.idle_floor_s": 600.0}
"""For a job in which one rank waits for the drill, and the other ranks wait for it."""
BACK = {"silence.evict_s": 30.0}
"""Lost machines that come back do so within this time, even on a busy computer, so they are not replaced
(the default is 2 s)."""
NOBODY_LEAVES: dict[str, Any] = {"evict.mode": EvictMode.SHADOW}
"""For a job with a second fault on the machine that is at fault: no machine is evicted."""
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
"""Short diagnostic tests for a drill's job: all machines share the few cores of one computer, so bandwidths
prove nothing."""
SHORT_REPLAY: dict[str, Any] = {"replay.steps": 3, "replay.timeout_s": 120.0}
"""Short replays for a drill's job."""
SLOW_AT = 200
"""Steps before a slowdown, so that everstep knows the job's pace (five samples of 32 steps)."""
SLOW_STEPS = 300
"""Steps after it, until the slowdown was detected, voted on and seen to end."""
SLOW_STEP_S = 0.1
"""Length of a step before the slowdown, seconds."""
SLOW_POLICY: dict[str, Any] = (
    HELD | BACK | SHORT_TESTS | {"slow.after_s": 1.0, "slow.round_s": 4.0, "hang.floor_s": 60.0}
)
"""A vote of 20 s for steps of 0.1 s (the default is 50 s): in rounds of 2 s a
busy computer leaves four samples, too few to show which rank the others wait for."""
DRILL_POLICY = GONE_POLICY | BACK | SHORT_TESTS
PATIENT_POLICY = {"hang.floor_s": 60.0, "hang.idle_floor_s": 60.0, "stop.exit_grace_s": 3.0} | BACK | SHORT_TESTS
"""A patient policy for a job that waits at a step until the drill is done."""
SILENT_S = 15.0
"""Time for which an agent stays away, seconds: longer than ``silence.detect_s``, and some polls more."""
SILENT_STEPS = 170
"""Number of steps of ``STEP_S`` in which an agent stays away and comes back."""
REPLACED_STEPS = 40
"""Number of steps of ``STEP_S`` in which a faulty machine is replaced while its ranks step."""
STEP_S = 0.2
"""Length of a step, seconds: long enough for the backup of the step before."""
STEPS_AGAIN = 5
"""A job that is this many steps after the step of the fault has recovered: the fault strikes within two steps."""
DISK_EVERY = 5
"""Steps between checkpoints on disk, for drills that need them."""


def disk_settings(disk: Path) -> dict[str, Any]:
    """Fields of the checkpoint policy for which all machines write to one folder that outlives them."""
    return {"disk_every_steps": DISK_EVERY, "disk_path": str(disk)}


def placement_of(spec: JobSpec) -> Placement:
    """The placement of a job's backups on a local cluster, which has no failure domains."""
    topology = spec.topology()
    if spec.checkpoint.backup:
        return place_backups(topology)
    return Placement((None,) * topology.world_size, involution=False, shared=(), reason="the job has no backups")


def machine_names(count: int) -> list[str]:
    """The names of a local cluster's machines, without standbys."""
    return [f"m{index}" for index in range(count)]
