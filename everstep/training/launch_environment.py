"""Reads the environment of a rank: the variables of everstep or, without them, the variables of torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from everstep.errors import ConfigError, TopologyError
from everstep.model.topology import SHORT_ORDER, Axis, Laid, Topology, parse_laid
from everstep.rank import environment


class JoinSizes(NamedTuple):
    """The sizes that a script passes to ``join``; None: the script does not pass this size."""

    tp: int | None = None
    pp: int | None = None
    order: tuple[Axis, ...] | None = None
    mesh: Mapping[str, int] | None = None
    """Every axis with its size, instead of ``tp``, ``pp`` and ``order``."""
    groups: tuple[str, ...] | None = None
    """Kinds of parallel groups that are not an axis, each as in ``ep=4:dp_shard+cp``."""

    def topology(self, machines: int, ranks_per_machine: int) -> Topology:
        """The topology with these sizes.

        Raises:
            TopologyError: the sizes do not multiply to the number of ranks.
        """
        if self.mesh is None:
            tp, pp = 1 if self.tp is None else self.tp, 1 if self.pp is None else self.pp
            short = Topology.of(machines, ranks_per_machine, tp, pp, self.order or SHORT_ORDER)
            return replace(short, laid=self._laid())
        if self[:3] != (None, None, None):
            raise TopologyError("the script joins with mesh and with tp, pp or order: give either mesh or those")
        return Topology(machines, ranks_per_machine, tuple(self.mesh.items()), self._laid())

    def _laid(self) -> tuple[Laid, ...]:
        return tuple(map(parse_laid, self.groups or ()))


def topology_of_job(sizes: JoinSizes) -> Topology:
    """The job's topology, from everstep's environment or else torchrun's.

    Args:
        sizes: The sizes from the script.

    Raises:
        TopologyError: the script's sizes do not multiply to the number of ranks, or are not those of the job.
        ConfigError: an environment variable of torchrun or everstep makes no sense.
    """
    text = os.environ.get(environment.TOPOLOGY)
    if not text:
        world = from_environment("WORLD_SIZE", 1)
        local = from_environment("LOCAL_WORLD_SIZE", world)
        if local < 1 or world % local:
            local = 1  # the machines have unequal sizes, so it is not known which ranks share a machine
        return sizes.topology(world // local, local)
    try:
        job = Topology.parse(text)
    except TopologyError as error:
        raise ConfigError(f"{environment.TOPOLOGY}: {error}") from None
    if sizes == JoinSizes():
        return job
    # Sizes that the script leaves out are those of the job.
    if sizes[:4] == (None, None, None, None):
        sizes = sizes._replace(mesh=dict(job.mesh))
    elif sizes.mesh is None and sorted(job.axes) == sorted(SHORT_ORDER):
        order: tuple[Axis, ...] = job.axes  # type: ignore[assignment]
        tp, pp = job.tp if sizes.tp is None else sizes.tp, job.pp if sizes.pp is None else sizes.pp
        sizes = sizes._replace(tp=tp, pp=pp, order=sizes.order or order)
    script = sizes.topology(job.machines, job.ranks_per_machine)
    if sizes.groups is None and script.mesh == job.mesh:
        script = replace(script, laid=job.laid)
    if script != job:
        raise TopologyError(
            f"the script joins with {script.text}, but the job was started with {job.text}: start the job with the "
            "script's sizes, or call everstep.join() without sizes to use the job's"
        )
    return job


def origin_of(agreed: int) -> Path | None:
    """The folder of a checkpoint with other parallel sizes from which this launch starts; None: there is none.

    Args:
        agreed: Completed steps of the state that the ranks restore. If this step is later than the folder's step, the
            job has already resumed from the folder.

    Raises:
        ConfigError: the variable does not name the folder of a step.
    """
    folder = os.environ.get(environment.RESHARD_FROM)
    if not folder:
        return None
    from everstep.shards.folders import step_of

    step = step_of(Path(folder))
    if step is None:
        raise ConfigError(
            f"{environment.RESHARD_FROM} is {folder!r}; it must be the folder of one step, e.g. …/step-000000120"
        )
    return Path(folder) if agreed <= 0 or agreed == step else None


def from_environment(name: str, default: int) -> int:
    """An integer from the environment; ``default`` if the variable is not set.

    Raises:
        ConfigError: the value is not an integer.
    """
    value = os.environ.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number") from None
