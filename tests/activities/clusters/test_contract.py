"""What every kind of cluster must do, and clusters whose machines are listed in a file."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.clusters.cluster import Cluster, ListedCluster, Listing
from controlplane.local.cluster_file import ClusterFile
from controlplane.own_cluster import own_cluster
from everstep.errors import ConfigError, EverstepError
from everstep.model.machine import Machine
from everstep.rank.environment import CLUSTER_NAME, INVENTORY

MACHINES = [
    Machine(name=f"m{number}", address=f"10.0.0.{number}:1", domain=f"rack-{number % 2}") for number in range(3)
]


AT_MOST = 5


def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    machines = list(MACHINES)

    async def grow(count: int) -> None:
        if count > AT_MOST:
            raise ConfigError(f"{AT_MOST} at most")
        machines.extend(Machine(name=f"m{number}", address="h:1") for number in range(len(machines), count))

    return ListedCluster(lambda: Listing(list(machines), 1, AT_MOST), grow)


MORE = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
for number in range(path.read_text().splitlines().count("[[machine]]"), int(sys.argv[2])):
    path.write_text(path.read_text() + f'\\n[[machine]]\\nname = "m{number}"\\naddress = "10.0.0.{number}:1"\\n')
"""


def of_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    lines = ["standbys = 1", f"at_most = {AT_MOST}"]
    for one in MACHINES:
        fields = {"name": one.name, "address": one.address, "failure_domain": one.domain}
        lines += ["[[machine]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    path = tmp_path / "machines.toml"
    lines.insert(0, f"provision = {json.dumps([sys.executable, '-c', MORE, str(path)])}")
    path.write_text("\n".join(lines))
    monkeypatch.delenv(CLUSTER_NAME, raising=False)
    monkeypatch.setenv(INVENTORY, str(path))
    found = own_cluster()
    assert found is not None
    return found


def of_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.setenv(CLUSTER_NAME, "here")
    ClusterFile(
        name="here",
        home=tmp_path,
        shm=tmp_path,
        temporal_address="h:1",
        ui_url="",
        ledger_url="",
        machines=MACHINES,
        standbys=1,
        at_most=AT_MOST,
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
    assert (listing.standbys, listing.at_most) == (1, AT_MOST)


@pytest.mark.parametrize(
    "kind", [in_memory, of_inventory]
)  # a local cluster that runs: controlplane/local/test_grow.py
async def test_it_has_as_many_machines_as_it_was_asked_for(
    kind: Callable[[Path, pytest.MonkeyPatch], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = kind(tmp_path, monkeypatch)
    for asked, there in ((4, 4), (4, 4), (2, 4), (5, 5)):
        await cluster.provision(asked)
        machines = (await cluster.list()).machines
        assert [machine.name for machine in machines] == [f"m{number}" for number in range(there)]
        assert machines[:3] == MACHINES


async def test_more_than_it_may_have_is_refused(cluster: Cluster) -> None:
    with pytest.raises(EverstepError):
        await cluster.provision(AT_MOST + 1)
    assert (await cluster.list()).machines == MACHINES


async def test_a_list_that_nobody_can_make_longer_says_so() -> None:
    with pytest.raises(EverstepError, match="no command is configured that adds machines"):
        await ListedCluster(lambda: Listing(MACHINES, 1)).provision(4)


async def test_a_program_that_fails_is_named_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = of_inventory(tmp_path, monkeypatch)
    path = tmp_path / "machines.toml"
    path.write_text(
        path.read_text()
        .replace("import pathlib", "sys.exit('no quota is left') #")
        .replace("sys.exit", "raise SystemExit")
    )
    with pytest.raises(EverstepError, match=r"'provision'.*no quota is left"):
        await cluster.provision(4)


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
    for name in (CLUSTER_NAME, INVENTORY):
        monkeypatch.delenv(name, raising=False)
    assert own_cluster() is None
