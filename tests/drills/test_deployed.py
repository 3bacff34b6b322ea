"""Three machines in a separate network, deployed as docs/guides/deploy.md says, and faults that may happen to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from drills.clusters.network import missing
from tests.drills.deployed import MACHINES, STEPS, Deployed, Losses, over, read

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=f"a deployment cannot be tried here: {missing()}"),
]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with Deployed(tmp_path_factory.mktemp("deployed")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(deployed: Deployed) -> Losses:
    path = deployed.start_job("undisturbed", 0.05)
    found = deployed.until("undisturbed", over)
    assert (found["status"], found["incident_count"]) == ("finished", 0), deployed.logs()
    return read(path)


def test_the_doctor_finds_every_machine(deployed: Deployed) -> None:
    done = deployed.everstep("doctor", "--json", limit_s=100.0)
    found = {one["name"]: one for one in json.loads(done.stdout) if one["machines"]}

    for name in ("agent", "ports", "network"):
        assert (found[name]["status"], found[name]["machines"]) == ("ok", list(MACHINES)), found[name]


def test_a_job_runs_on_machines_that_were_deployed_by_the_book(undisturbed: Losses) -> None:
    assert sorted(undisturbed) == list(range(STEPS))


@pytest.mark.wide
def test_a_link_is_down_and_then_a_machine_is_cut_off_from_the_control_host(
    deployed: Deployed, undisturbed: Losses
) -> None:
    """One job has both faults, since a separate job for each would take another 15 s."""
    path = deployed.start_job("both", 0.5)
    deployed.trained(path, 4)
    with deployed.network.link_down("gpu-2"):
        time.sleep(8.0)
        while_down = deployed.status("both")
    deployed.trained(path, 10)
    with deployed.network.cut_off("gpu-1"):
        before = len(read(path))
        time.sleep(4.0)
        while_cut_off = deployed.status("both")
        assert len(read(path)) > before, "the ranks do not need the control host"
    found = deployed.until("both", over)

    assert while_down["status"] != "running" or "gpu-2" in while_down["silent"], while_down
    assert while_cut_off["silent"] == ["gpu-1"]
    [silent] = [one for one in while_cut_off["machines"] if one["name"] == "gpu-1"]
    assert silent["problem"].startswith(f"the agent at {MACHINES['gpu-1']}:7070 did not answer")
    assert found["status"] == "finished", deployed.logs()
    assert [one["resolution"] for one in found["incidents"]] == ["reattempt"], (
        "one reattempt was enough, without an operator"
    )
    assert read(path) == undisturbed
