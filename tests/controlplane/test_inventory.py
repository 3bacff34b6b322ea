"""The machines of a deployed cluster: what an inventory may contain, and how commands use it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from temporalio.service import RPCError, RPCStatusCode

from console import main
from controlplane.client import Control
from controlplane.inventory import Inventory, inventory_path, load
from controlplane.references import JobRun
from controlplane.start_checks.machines import choose_machines
from everstep.errors import ClusterError, ConfigError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.pool import PoolMachine, PoolPlace, PoolState
from everstep.rank.environment import INVENTORY

GOOD = """
standbys = 1
[[machine]]
name = "gpu-0"
address = "10.0.4.1:7070"
failure_domain = "rack-1"
[[machine]]
name = "gpu-1"
address = "10.0.4.2:7070"
failure_domain = "rack-2"
[[machine]]
name = "spare.1"
address = "[fd00::1]:7070"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return path


def test_a_file_names_machines_and_the_last_ones_are_standbys(tmp_path: Path) -> None:
    found = load(written(tmp_path, GOOD))

    assert found.offered == [
        Machine(name="gpu-0", address="10.0.4.1:7070", domain="rack-1"),
        Machine(name="gpu-1", address="10.0.4.2:7070", domain="rack-2"),
    ]
    assert [one.name for one in found.machines] == ["gpu-0", "gpu-1", "spare.1"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("gpu-1", "gpu-0"), "name gpu-0 is listed 2 times"),
        (("10.0.4.2:7070", "10.0.4.1:7070"), "address 10.0.4.1:7070 is listed 2 times"),
        (("standbys = 1", "standbys = 3"), "standbys = 3: none of the 3 machines is left for jobs"),
        (("standbys = 1", 'standbys = "1"'), "standbys = '1': Input should be a valid integer"),
        (
            ("10.0.4.1:7070", "10.0.4.1"),
            "machine[1].address = '10.0.4.1': '10.0.4.1' is not host:port, e.g. 10.0.4.17:7070",
        ),
        (("10.0.4.1:7070", "10.0.4.1:99999"), "machine[1].address = '10.0.4.1:99999': '99999' is not a port"),
        (("10.0.4.1:7070", "10.0.4.1:0"), "machine[1].address = '10.0.4.1:0': the agent's port is missing"),
        (("10.0.4.1:7070", "10.0.4.1:7070-7080"), "has a range of ports; give one port"),
        (("10.0.4.1:7070", "fd00::1:7070"), "has an IPv6 address without brackets; write it as in [fd00::17]:7070"),
        (("failure_domain", "rack"), "machine[1].rack: Extra inputs are not permitted"),
        (('name = "gpu-1"', ""), "machine[2].name: Field required"),
        (("gpu-1", "gpu/1"), "machine[2].name = 'gpu/1'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    path = written(tmp_path, GOOD.replace(*change))

    with pytest.raises(ConfigError) as failure:
        load(path)

    assert f"the inventory {path} has problems:\n  - " in str(failure.value)
    assert told in str(failure.value)


def test_a_machine_may_have_an_ipv6_address(tmp_path: Path) -> None:
    [machine, *_] = load(written(tmp_path, GOOD.replace("10.0.4.1:7070", "[fd00::17]:7070"))).machines
    assert (machine.address, machine.host) == ("[fd00::17]:7070", "fd00::17")


@pytest.mark.parametrize(("text", "told"), [("[[machine]", "is not TOML"), ("", "machine: Field required")])
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"there is no inventory .*/missing\.toml: check the path"):
        load(tmp_path / "missing.toml")


def test_the_option_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INVENTORY, raising=False)
    assert inventory_path(None) is None
    monkeypatch.setenv(INVENTORY, "/etc/everstep/machines.toml")
    assert inventory_path(None) == Path("/etc/everstep/machines.toml")
    assert inventory_path(Path("mine.toml")) == Path("mine.toml")


def test_an_inventory_without_a_temporal_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "none.toml"))
    monkeypatch.setenv(INVENTORY, str(written(tmp_path, GOOD)))
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))

    assert main.run(["status"]) == main.EXIT_USAGE
    assert "set TEMPORAL_ADDRESS, or unset EVERSTEP_INVENTORY" in capsys.readouterr().err


class NoJobs(Control):
    """A connection to a deployed cluster. Nothing runs on it, unless its pool and ``running`` say otherwise."""

    def __init__(self, inventory: Inventory | None, pool: PoolState | None = None, running: Sequence[str] = ()) -> None:
        super().__init__(cast(Any, self), None, inventory)
        self.pool, self.running = pool, running

    async def jobs(self, limit: int = 0) -> list[Any]:
        return [JobRun(name, "running", datetime.now(UTC), None) for name in self.running]

    def get_workflow_handle(self, _id: str) -> NoJobs:
        return self

    async def query(self, *_: Any, **__: Any) -> PoolState:
        if self.pool is None:
            raise RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")
        return self.pool


async def test_a_job_gets_machines_of_the_inventory(tmp_path: Path) -> None:
    control = NoJobs(load(written(tmp_path, GOOD)))
    spec = JobSpec(name="gpt", script="/x.py", machines=2)

    assert [machine.name for machine in await choose_machines(control, spec)] == ["gpu-0", "gpu-1"]
    with pytest.raises(ConfigError, match=r"needs 3 machines, and the inventory has 2 without the standbys: add some"):
        await choose_machines(control, spec.model_copy(update={"machines": 3}))
    with pytest.raises(ClusterError, match="--inventory or EVERSTEP_INVENTORY"):
        await choose_machines(NoJobs(None), spec)


def pool_of(**places: str) -> PoolState:
    """The pool of the machines of ``GOOD``. For example, ``gpu_1="active bert"`` gives gpu-1 to the job bert."""
    state = PoolState(known=True)
    for name, said in places.items():
        place, _, job = said.partition(" ")
        machine = Machine(name=name.replace("_", "-").replace("spare-1", "spare.1"), address="10.0.4.1:1")
        state.machines[machine.name] = PoolMachine(machine=machine, place=PoolPlace(place), job=job)
    return state


async def chosen(tmp_path: Path, pool: PoolState, machines: int = 2, running: Sequence[str] = ("bert",)) -> list[str]:
    control = NoJobs(load(written(tmp_path, GOOD)), pool, running)
    spec = JobSpec(name="gpt", script="/x.py", machines=machines)
    return [machine.name for machine in await choose_machines(control, spec)]


async def test_a_job_gets_no_machine_that_an_operator_takes_out_of_its_run_before(tmp_path: Path) -> None:
    """An operator evicted gpu-0 from the earlier run of this job."""
    pool = pool_of(gpu_0="active gpt", gpu_1="active gpt", spare_1="free")
    wanted_out = {"wanted_out": True, "by": "ada", "why": "a loud fan"}
    pool.machines["gpu-0"] = pool.machines["gpu-0"].model_copy(update=wanted_out)
    assert await chosen(tmp_path, pool, running=()) == ["gpu-1", "spare.1"]
    pool.machines["gpu-1"] = pool.machines["gpu-1"].model_copy(update={"job": "bert"})
    with pytest.raises(ConfigError, match="gpu-0 is evicted by ada; gpu-1 is in use by job bert"):
        await chosen(tmp_path, pool)


async def test_a_job_does_not_start_on_a_machine_that_is_known_to_be_faulty(tmp_path: Path) -> None:
    pool = pool_of(gpu_0="free", gpu_1="free", spare_1="free")
    pool.machines["gpu-0"] = pool.machines["gpu-0"].model_copy(update={"fault": "gpu-lost: GPU 3: lost"})
    assert await chosen(tmp_path, pool) == ["gpu-1", "spare.1"]
    pool.machines["gpu-1"] = pool.machines["gpu-1"].model_copy(update={"place": PoolPlace.STANDBY})
    with pytest.raises(ConfigError, match=r"gpu-0 is faulty \(gpu-lost: GPU 3: lost\)"):
        await chosen(tmp_path, pool)


async def test_a_job_gets_no_machine_that_another_one_has(tmp_path: Path) -> None:
    pool = pool_of(gpu_0="active bert", gpu_1="free", spare_1="standby")
    wanted = r"needs 2 machines, and 1 is free: gpu-0 is in use by job bert; spare.1 is standby. Wait"
    with pytest.raises(ConfigError, match=wanted):
        await chosen(tmp_path, pool)
    assert await chosen(tmp_path, pool, machines=1) == ["gpu-1"]
    assert await chosen(tmp_path, pool, running=()) == ["gpu-0", "gpu-1"], "job bert is over, so its machine is free"


async def test_machines_out_of_use_are_passed_over_and_a_former_standby_is_a_machine_like_others(
    tmp_path: Path,
) -> None:
    pool = pool_of(gpu_0="quarantined", gpu_1="free", spare_1="free")
    assert await chosen(tmp_path, pool) == ["gpu-1", "spare.1"]
