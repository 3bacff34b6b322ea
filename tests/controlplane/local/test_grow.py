"""A running cluster gets more machines, and the caller does not wait until they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.local import cluster as local
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.commands import Commands
from controlplane.local.grow import grow
from controlplane.local.plan import ClusterPlan
from controlplane.local.readiness import agent_serves, holds
from everstep.errors import ClusterError

NAME = "trial"


def test_a_cluster_grows_up_to_its_limit(home: Path, commands: Commands) -> None:
    before = local.up(NAME, machines=1, standbys=1, workers=1, at_most=4, commands=commands)
    running = local.processes(before)

    for _ in range(2):  # the second call changes nothing
        grow(NAME, 4)
    grown = ClusterFile.load(NAME)

    assert [machine.name for machine in grown.machines] == ["m0", "m1", "m2", "m3"]
    assert (grown.machines[:2], grown.standbys) == (before.machines, 1)
    assert holds(lambda: {"agent-m2", "agent-m3"} <= local.processes(grown).keys(), 60.0)
    for machine in grown.machines:
        agent_serves(grown, machine.name, machine.address)
    assert running.items() <= local.processes(grown).items(), "no running process was restarted"
    assert {machine.address for machine in grown.machines} <= set(ClusterPlan.load(grown.home).addresses)

    with pytest.raises(ClusterError, match="at most 4 machines"):
        grow(NAME, 5)
    again = local.up(NAME, machines=1, standbys=1, workers=1, commands=commands)
    assert again == grown, "a later 'up' keeps the new machines"


def test_a_new_agent_is_started_like_the_others(home: Path, commands: Commands) -> None:
    own = Commands(
        worker=commands.worker, agent=lambda m, state, shm: [*commands.agent(m, state, shm), str(state), str(shm)]
    )
    cluster = local.up(NAME, machines=1, standbys=0, workers=1, at_most=2, commands=own)
    grow(NAME, 2)
    first, second = (
        next(entry for entry in ClusterPlan.load(cluster.home).processes if entry.name == f"agent-{name}")
        for name in ("m0", "m1")
    )
    assert second.env == first.env
    assert second.argv[-2:] == [str(cluster.home / "machines" / "m1"), str(cluster.shm / "m1")]
    assert (cluster.home / "machines" / "m1").is_dir()


def test_a_stopped_cluster_does_not_grow(home: Path, commands: Commands) -> None:
    local.up(NAME, machines=1, standbys=0, workers=1, at_most=2, commands=commands)
    local.down(NAME)
    with pytest.raises(ClusterError, match="everstep up"):
        grow(NAME, 2)
