"""What the environment of a rank says: everstep's variables, else torchrun's."""

from __future__ import annotations

import os
from pathlib import Path

from everstep import environment
from everstep.errors import ConfigError, TopologyError
from everstep.model.topology import Axis, Topology

DEFAULT_ORDER: tuple[Axis, ...] = ("pp", "dp", "tp")


def topology_of_job(tp: int | None, pp: int | None, order: tuple[Axis, ...] | None) -> Topology:
    """The job's topology, from everstep's environment or else torchrun's."""
    given = os.environ.get(environment.TOPOLOGY)
    if not given:
        world = from_environment("WORLD_SIZE", 1)
        local = from_environment("LOCAL_WORLD_SIZE", world)
        if local < 1 or world % local:
            local = 1  # machines of unequal size: which ranks share one is not known
        return Topology(world // local, local, 1 if tp is None else tp, 1 if pp is None else pp, order or DEFAULT_ORDER)
    try:
        job = Topology.parse(given)
    except TopologyError as error:
        raise ConfigError(f"{environment.TOPOLOGY}: {error}") from None
    wanted = (job.tp if tp is None else tp, job.pp if pp is None else pp, job.order if order is None else order)
    if wanted != (job.tp, job.pp, job.order):
        raise TopologyError(
            f"the script joins with tp={wanted[0]} pp={wanted[1]} order={'-'.join(wanted[2])}, but the job was started "
            f"with tp={job.tp} pp={job.pp} order={'-'.join(job.order)}: start the job with the script's sizes, or call "
            "everstep.join() without sizes to take the job's"
        )
    return job


def origin_of(agreed: int) -> Path | None:
    """The folder of the checkpoint of other sizes that the job starts from; None when it is further already."""
    given = os.environ.get(environment.RESHARD_FROM)
    if not given:
        return None
    from everstep.shards.folders import step_of

    step = step_of(Path(given))
    if step is None:
        raise ConfigError(f"{environment.RESHARD_FROM} is {given!r}; it must be a folder of one step, …/step-000000120")
    return Path(given) if agreed <= 0 or agreed == step else None


def from_environment(name: str, default: int) -> int:
    """An integer from the environment."""
    value = os.environ.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number") from None
