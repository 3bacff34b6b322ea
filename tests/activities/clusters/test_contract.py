"""What every kind of cluster keeps to, and what those do that a file lists."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.clusters.cluster import Cluster, Listing
from activities.clusters.listed import ListedCluster
from controlplane.inventory import VARIABLE
from controlplane.local.cluster_file import ClusterFile
from controlplane.own_cluster import LOCAL, own_cluster
from everstep.errors import EverstepError
from everstep.model.machine import Machine

MACHINES = [
    Machine(name=f"m{number}", address=f"10.0.0.{number}:1", domain=f"rack-{number % 2}") for number in range(3)
]


def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return ListedCluster(lambda: Listing(MACHINES, 1))


def of_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    lines = ["standbys = 1"]
    for one in MACHINES:
        fields = {"name": one.name, "address": one.address, "failure_domain": one.domain}
        lines += ["[[machine]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    path = tmp_path / "machines.toml"
    path.write_text("\n".join(lines))
    monkeypatch.delenv(LOCAL, raising=False)
    monkeypatch.setenv(VARIABLE, str(path))
    found = own_cluster()
    assert found is not None
    return found


def of_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.setenv(LOCAL, "here")
    ClusterFile(
        name="here",
        home=tmp_path,
        shm=tmp_path,
        temporal_address="h:1",
        ui_url="",
        ledger_url="",
        machines=MACHINES,
        standbys=1,
    ).save()
    found = own_cluster()
    assert found is not None
    return found


KINDS = [in_memory, of_inventory, of_a_local_cluster]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    kind: Callable[[Path, pytest.MonkeyPatch], Cluster] = request.param
    return kind(tmp_path, monkeypatch)


async def test_all_machines_are_listed_with_their_domains_and_the_standbys_last(cluster: Cluster) -> None:
    listing = await cluster.list()
    assert listing.machines == MACHINES
    assert listing.standbys == 1


async def test_nobody_else_waits_while_it_is_asked(cluster: Cluster) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await cluster.list()
    task.cancel()
    assert turns > 0


async def test_a_list_that_changes_counts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = of_a_local_cluster(tmp_path, monkeypatch)
    file = ClusterFile.load("here")
    file.model_copy(update={"machines": [*MACHINES, Machine(name="m9", address="h:9")]}).save()
    assert [machine.name for machine in (await cluster.list()).machines] == ["m0", "m1", "m2", "m9"]


@pytest.mark.parametrize("kind", [of_inventory, of_a_local_cluster])
async def test_a_list_that_cannot_be_read_is_unknown_and_not_empty(
    kind: Callable[[Path, pytest.MonkeyPatch], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = kind(tmp_path, monkeypatch)
    for path in (tmp_path / "machines.toml", ClusterFile.path_of("here")):
        path.unlink(missing_ok=True)
    with pytest.raises(EverstepError):
        await cluster.list()


def test_where_nothing_says_which_machines_there_are_there_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LOCAL, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert own_cluster() is None
