"""Four agents with separate networks: a cut link, a machine that reaches no other machine, and one wrong bit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.local.certificates import Certificates
from controlplane.local.network import CONTROL, Network, missing
from everstep.model.diagnosis import Diagnosis
from everstep.rank import environment

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"machines can have no network of their own here: {missing()}"),
]
ADDRESSES = {f"m{index}": f"10.97.0.1{index}" for index in range(4)}
PORT = 7070
ASKS = """
import asyncio, json, sys
from activities.agents.diagnose_machines import Diagnosing
from activities.agents.diagnose_machines import DiagnoseMachines
from agent.client import AgentClients

async def main():
    agents = AgentClients()
    given = DiagnoseMachines.model_validate_json(sys.argv[1])
    found = await Diagnosing(agents, given, "", lambda text: print(text, file=sys.stderr)).run()
    await agents.close()
    print(found.model_dump_json())

asyncio.run(main())
"""
ROOT = Path(__file__).parents[3]


class FourMachines:
    """Agents in network namespaces, joined by a bridge."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(ADDRESSES, "10.97.0.1")
        self.plan = folder / "faults.json"
        self._agents: list[subprocess.Popen[bytes]] = []
        self._variables = os.environ | {"PYTHONPATH": str(ROOT), environment.FAULTS: str(self.plan)}

    def start(self) -> None:
        self.network.make()
        certificates = Certificates(self.folder / "certificates")
        certificates.make(ADDRESSES)
        self._variables[environment.AGENT_CA_FILE] = str(certificates.authority)
        (self.folder / "monitor.toml").write_text("off = true")
        for machine, address in ADDRESSES.items():
            own = self.folder / machine
            command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine]
            command += ["--listen", f"{address}:{PORT}", "--state-dir", str(own), "--shm-dir", str(own / "shm")]
            command += ["--monitor", str(self.folder / "monitor.toml"), *certificates.options(machine)]
            with (self.folder / f"{machine}.log").open("wb") as log:
                self._agents.append(
                    subprocess.Popen(
                        [*self.network.inside(machine), *command], env=self._variables, stdout=log, stderr=log
                    )
                )

    def close(self) -> None:
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            agent.wait(20)
        assert self.network.remove() == [], "no process is left in the network"

    def diagnosed(self, *tests: str, **settings: dict[str, Any]) -> Diagnosis:
        machines = [{"name": name, "address": f"{address}:{PORT}"} for name, address in ADDRESSES.items()]
        given = {"machines": machines, "tests": tests, "settings": settings, "patience_s": 60.0}
        done = subprocess.run(
            [*self.network.inside(CONTROL), sys.executable, "-P", "-c", ASKS, json.dumps(given)],
            env=self._variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return Diagnosis.model_validate_json(done.stdout)

    @contextlib.contextmanager
    def cut(self, *pairs: tuple[str, str]) -> Iterator[None]:
        """Cut links between pairs of machines. The control host still reaches all machines."""
        ways = [way for one, other in pairs for way in ((one, ADDRESSES[other]), (other, ADDRESSES[one]))]
        for machine, address in ways:
            self.network.run(machine, "ip", "route", "add", "blackhole", f"{address}/32")
        try:
            yield
        finally:
            for machine, address in ways:
                self.network.run(machine, "ip", "route", "del", "blackhole", f"{address}/32")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FourMachines]:
    found = FourMachines(tmp_path_factory.mktemp("machines"))
    try:
        found.start()
        yield found
    finally:
        found.close()


BETWEEN = {"nic": {"seconds": 0.2, "answer_s": 3.0}, "all-gather": {"mb": 1, "rounds": 1, "answer_s": 5.0}}


def test_all_are_well(machines: FourMachines) -> None:
    found = machines.diagnosed("nic", "all-gather", **BETWEEN)

    assert (found.faulty, found.links) == ([], []), found
    assert [pair.passed for pair in found.pairs] == [True] * 8
    assert {one.verdict for one in found.machines} == {"healthy"}


@pytest.mark.parametrize("test", ["nic", "all-gather"])
def test_a_cut_link_is_named_and_no_machine(machines: FourMachines, test: str) -> None:
    with machines.cut(("m1", "m2")):
        found = machines.diagnosed(test, **BETWEEN)

    assert [(link.machines, link.test) for link in found.links] == [(("m1", "m2"), test)]
    assert found.faulty == []


@pytest.mark.parametrize("bad", ["m0", "m3"])
def test_a_machine_that_reaches_no_other_one_is_named(machines: FourMachines, bad: str) -> None:
    with machines.cut(*((bad, other) for other in ADDRESSES if other != bad)):
        found = machines.diagnosed("all-gather", "nic", **BETWEEN)

    assert (found.faulty, found.links) == ([bad], [])


@pytest.mark.parametrize("bad", sorted(ADDRESSES))
def test_a_machine_that_computes_one_wrong_bit_is_named(machines: FourMachines, bad: str) -> None:
    machines.plan.write_text(json.dumps([{"id": f"flip {bad} {time.time_ns()}", "fault": "bitflip", "machine": bad}]))
    try:
        found = machines.diagnosed("bitwise", bitwise={"seconds": 0})
    finally:
        machines.plan.unlink()

    assert found.faulty == [bad]
    assert [one.machine for one in found.machines if one.verdict == "healthy"] == sorted(ADDRESSES.keys() - {bad})
