"""A soak is killed and resumed. In a soak, faults meet each other in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from controlplane.local import cluster_processes
from controlplane.local.cluster_file import ClusterFile
from soaks.plan import GAP, How, SoakPlan

pytestmark = [pytest.mark.drill, pytest.mark.wide, pytest.mark.timeout(400)]

SIZES = ["--machines", "4", "--ranks-per-machine", "1", "--tp", "2", "--pp", "1"]
QUICK = ["kill-rank", "raise", "kill-during-save", "kill-machine", "kill-agent", "kill-forkserver", "kill-worker"]
"""Kinds of faults that need neither long waits nor another cluster."""
ONLY = [text for kind in (*QUICK, "kill-temporal", "flip-bit") for text in ("--only", kind)]


def soak(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "soaks", "soak", "--json", "--tries", "0", *arguments]
    env = os.environ | {"EVERSTEP_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=360)
    assert out, err
    found: dict[str, Any] = json.loads(out)
    assert (process.returncode, found["violated"], found["ok"]) == (0, 0, True), err
    return found


@pytest.mark.parametrize(
    ("faults", "seed", "hows"),
    [
        (5, 16, {*get_args(How)}),
        (10, 4, {*get_args(How)}),
        # A machine is lost right after a restart, when its backups may be behind on a busy computer.
        (4, 52, {"together", "within"}),
    ],
)
def test_a_killed_soak_is_resumed_with_the_remaining_faults(
    tmp_path: Path, faults: int, seed: int, hows: set[How]
) -> None:
    folder = tmp_path / "soak"
    journal = folder / "journal.jsonl"
    killed = soak(tmp_path, "--faults", str(faults), "--seed", str(seed), *SIZES, *ONLY, "--folder", str(folder))
    deadline = time.monotonic() + 180
    while not (journal.exists() and journal.read_text().endswith("\n")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert '"violations":[]' in journal.read_text().splitlines()[0]
    left = json.loads((folder / "cluster.json").read_text())
    described = Path(left["folder"]) / "clusters" / left["name"] / "cluster.json"
    cluster = ClusterFile.model_validate_json(described.read_text())
    assert cluster_processes.of_cluster(cluster.id)

    found = ended(soak(tmp_path, "--resume", str(folder)))

    assert cluster_processes.of_cluster(cluster.id) == set() and not cluster.shm.exists() and not described.exists()
    plan = SoakPlan.read(folder / "plan.json")
    assert {one.how for one in plan.episodes} == hows
    assert found["faults_tried"] == found["faults_survived"] == plan.faults >= faults
    assert [one["number"] for one in found["episodes"]] == [one.number for one in plan.episodes]
    assert any(one["incidents"] for one in found["episodes"])
    assert all(one["steps"][1] == one["steps"][0] + GAP for one in found["episodes"])
    assert list(tmp_path.glob("everstep-drill-*")) == []
    assert ended(soak(tmp_path, "--resume", str(folder))) == found, (
        "a complete soak does not change if it is resumed again"
    )
