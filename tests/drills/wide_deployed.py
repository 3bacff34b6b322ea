"""Faults of a deployed cluster that last longer, or that happen while it recovers, for ``make drills``."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from drills.clusters.network import missing
from tests.drills.deployed import GUIDES, MACHINES, Deployed, Losses, blocks, over, read
from tests.postgres import Postgres

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing()), reason=f"a deployment cannot be tried here: {missing()}"),
]
PASSWORD = "hunter2"
SLOWLY_S = 1.5
"""The length of a step in drills that ask for the job's status while it runs, seconds."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    server.start()
    yield server
    server.kill()
    server.remove()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Deployed]:
    with Deployed(tmp_path_factory.mktemp("deployed"), postgres.socket_url("postgres", PASSWORD)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(deployed: Deployed) -> Losses:
    path = deployed.start_job("undisturbed", 0.05)
    assert deployed.until("undisturbed", over)["status"] == "finished"
    return read(path)


def pid_of_a_rank(deployed: Deployed, job: str) -> int:
    """Return the pid of a rank of the second machine. Its agent may need a moment to answer."""
    found = deployed.until(job, lambda found: bool(found["machines"][1]["ranks"]))
    pid: int = found["machines"][1]["ranks"][0]["pid"]
    return pid


def kill_a_rank(deployed: Deployed, job: str) -> None:
    """Kill a rank from outside, as the kernel could."""
    os.kill(pid_of_a_rank(deployed, job), signal.SIGKILL)


def went_on(deployed: Deployed, job: str, incidents: int) -> None:
    found = deployed.until(job, over)
    assert found["status"] == "finished", deployed.logs()
    assert [one["resolution"] for one in found["incidents"]] == ["reattempt"] * incidents, "no operator was needed"


def test_a_link_that_is_down_for_longer_than_a_stop_waits(deployed: Deployed, undisturbed: Losses) -> None:
    """The job is parked, and continues without an operator."""
    path = deployed.start_job("long-link-down")
    deployed.trained(path, 10)
    with deployed.network.link_down("gpu-2"):
        deployed.until("long-link-down", lambda found: found["status"] == "parked")
        assert deployed.status("long-link-down")["silent"] == ["gpu-2"]
        time.sleep(5.0)
    went_on(deployed, "long-link-down", 1)
    assert read(path) == undisturbed


@pytest.mark.timeout(1200)
def test_a_rank_dies_at_each_moment_of_a_change_of_tokens_and_certificates(
    deployed: Deployed, undisturbed: Losses
) -> None:
    """The steps are those of the guide. No process but the ranks is restarted, and no job waits for an operator."""
    [token] = blocks("New tokens and certificates", (GUIDES / "security.md").read_text())
    new = secrets.token_hex(32)
    deployed.rotate(f"echo {new} > new")
    steps = [partial(deployed.rotate, line) for line in token.splitlines()]
    steps += [partial(deployed.certify_again, machine) for machine in MACHINES]
    for number, step in enumerate(steps):
        job = f"rotation-{number}"
        path = deployed.start_job(job, SLOWLY_S)
        deployed.trained(path, 2)
        pid = pid_of_a_rank(deployed, job)
        step()
        os.kill(pid, signal.SIGKILL)
        went_on(deployed, job, 1)
        assert read(path) == undisturbed


def test_a_machine_with_another_token_is_waited_for(deployed: Deployed, undisturbed: Losses) -> None:
    path = deployed.start_job("forgotten", SLOWLY_S)
    deployed.trained(path, 5)
    folder = deployed.folder / "etc-gpu-2"
    before = (folder / "token").read_text()
    (folder / "token").write_text(f"{secrets.token_hex(32)}\n")
    deployed.until("forgotten", lambda found: found["silent"] == ["gpu-2"])
    kill_a_rank(deployed, "forgotten")
    found = deployed.until("forgotten", lambda found: found["status"] != "running")
    assert "no valid token" in json.dumps(found)
    (folder / "token").write_text(before)
    went_on(deployed, "forgotten", 1)
    assert read(path) == undisturbed


def test_two_faults_while_the_ledger_is_away(deployed: Deployed, undisturbed: Losses, postgres: Postgres) -> None:
    path = deployed.start_job("ledger-away")
    deployed.trained(path, 8)
    postgres.kill()
    try:
        for step in (12, 20):
            kill_a_rank(deployed, "ledger-away")
            deployed.trained(path, step)
    finally:
        postgres.start()
    went_on(deployed, "ledger-away", 2)
    assert read(path) == undisturbed
    assert PASSWORD not in deployed.logs()
    told = deployed.everstep("incidents", "ledger-away").stdout
    assert told.count("incident/ledger-away/") >= 1, told


def test_all_workers_die_and_a_rank_does_before_they_are_back(deployed: Deployed, undisturbed: Losses) -> None:
    path = deployed.start_job("workers-die")
    deployed.trained(path, 8)
    pid = pid_of_a_rank(deployed, "workers-die")
    deployed.kill_workers()
    os.kill(pid, signal.SIGKILL)
    time.sleep(3.0)
    deployed.start_workers()
    went_on(deployed, "workers-die", 1)
    assert read(path) == undisturbed
