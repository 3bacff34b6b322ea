"""Episodes that need a separate job: a drill on the soak's cluster."""

from __future__ import annotations

import time

from drills.clusters.local import DrillCluster
from drills.runner import Drill, References
from drills.spec.request import DrillRequest
from everstep.errors import ClusterError
from soaks.plan import Episode, SoakPlan
from soaks.result import EpisodeResult, undisturbed


async def run_own_job(cluster: DrillCluster, plan: SoakPlan, episode: Episode, references: References) -> EpisodeResult:
    """Run an episode's fault as a drill; what its judge finds is violated.

    Raises:
        CannotInject: this computer does not allow it.
    """
    began, result = time.monotonic(), undisturbed(episode)
    fault, sizes = episode.faults[0], plan.sizes.model_dump()
    if fault.alike:
        sizes |= {"ranks_per_machine": 1, "tp": 1, "pp": 1}
    try:
        drilled = await Drill(cluster, DrillRequest(fault=fault, **sizes), references).run()
    except ClusterError as error:
        result.violations.append(f"steps go on: {error}")
        return result
    result.steps = (0, drilled.steps or 0)
    result.incidents, result.recovered_s = drilled.incidents, drilled.recovered_s
    result.steps_lost = drilled.steps_lost or 0
    if drilled.fired:
        result.violations = drilled.problems
    else:
        # What follows from a fault that did not come is no violation; what no job may do whatever struck it is one.
        result.not_fired = drilled.problems[:1] or [f"{drilled.fault} did not fire"]
        whole = not drilled.leaked and not drilled.duplicates and drilled.losses_match and drilled.state_match
        result.violations = [] if whole else drilled.problems
    result.seconds = round(time.monotonic() - began, 3)
    return result
