"""Episodes that need a job of their own: the drill itself, on the cluster of the soak."""

from __future__ import annotations

import time

from drills.clusters.local import DrillCluster
from drills.runner import Drill, References
from drills.soak.plan import Episode, SoakPlan
from drills.soak.result import EpisodeResult, undisturbed
from drills.spec.catalogue import kind_of
from drills.spec.request import ALIKE, DrillRequest
from everstep.errors import ClusterError


async def run_own_job(cluster: DrillCluster, plan: SoakPlan, episode: Episode, references: References) -> EpisodeResult:
    """Run an episode's fault as a drill; what its judge finds is violated.

    Raises:
        CannotInject: this computer does not let us.
    """
    began, result = time.monotonic(), undisturbed(episode)
    options = episode.faults[0].model_dump(exclude_unset=True) | plan.sizes.model_dump()
    if kind_of(episode.faults[0].fault).alike:
        options |= ALIKE | {"machines": plan.sizes.machines}
    try:
        drilled = await Drill(cluster, DrillRequest.model_validate(options), references).run()
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
