"""The command ``everstep drill`` and the sweep, called as a script calls them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.local import cluster_processes
from controlplane.local.cluster import SHM_ROOT
from everstep.model.incident import Symptom
from soaks.sweep import SweepRow, run_sweep

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]

EVERSTEP = [sys.executable, "-P", "-m", "console.main"]
SMALL = ["--machines", "2", "--ranks-per-machine", "1", "--tp", "1", "--pp", "1", "--standbys", "0"]


def test_a_script_reads_the_verdict(tmp_path: Path) -> None:
    command = [*EVERSTEP, "drill", "kill-rank", "--rank", "1", "--at-step", "5", *SMALL, "--steps", "15"]
    done = subprocess.run(
        [*command, "--repeat", "2", "--json"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["fired"] is True and answer["losses_match"] is True
    assert answer["leaked"] == [] and answer["evicted"] == [] and answer["over_evicted"] == []
    assert answer["steps_lost"] <= 1
    assert answer["incidents"] == ["incident/kill-rank-01/0001", "incident/kill-rank-02/0001"]
    assert len(answer["runs"]) == 2
    times = answer["summary"]["recovered_s"]
    assert 0 < times["median"] <= times["p90"] <= times["max"]
    assert list(tmp_path.glob("everstep-drill-*")) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["slow-link", "--between", "m0", "m9"], 2, "m9"),
        (["kill-rank", "--rank", "99"], 2, "ranks go from 0 to 7"),
        (["kill-rank", "--at-step", "x"], 2, "--at-step"),
        ([], 2, "--list"),
    ],
)
def test_an_impossible_drill_is_refused_at_once(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run([*EVERSTEP, "drill", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr


def test_a_fault_that_this_computer_cannot_inject_has_its_own_exit_code(tmp_path: Path) -> None:
    """PATH is empty here, so the programs that the fault needs are missing."""
    done = subprocess.run(
        [*EVERSTEP, "drill", "slow-link", "--between", "m0", "m1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PATH": str(tmp_path)},
    )
    assert done.returncode == 3
    assert "slow-link" in done.stderr


async def test_a_drill_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    started = await asyncio.create_subprocess_exec(
        *EVERSTEP,
        *("drill", "kill-rank", *SMALL, "--steps", "5000", "--at-step", "4000"),
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert started.stderr is not None
    async with asyncio.timeout(120):
        while b"kill-rank-01" not in (line := await started.stderr.readline()):
            assert line, "the drill ended before its job was started"
        [home] = tmp_path.glob("everstep-drill-*/clusters/drill-*")  # noqa: ASYNC240
        identifier = json.loads((home / "cluster.json").read_text())["id"]
        assert cluster_processes.of_cluster(identifier)
        started.send_signal(signal.SIGTERM)
        await started.stderr.read()
        assert await started.wait() == 130
    assert cluster_processes.of_cluster(identifier) == set()
    assert not home.exists()
    assert not (SHM_ROOT / identifier).exists()


@pytest.mark.wide
async def test_a_sweep_finds_no_problem_at_any_event() -> None:
    rows: list[SweepRow] = []
    result = await run_sweep(first=3, last=8, every=5, each=rows.append)
    assert result.rows == rows
    assert [row.problems for row in rows] == [[], []]
    assert result.ok
    assert [(row.event, row.kind) for row in rows] == [(3, "WorkflowTaskStarted"), (8, "ActivityTaskStarted")]
    assert rows[0].newest is not None and rows[0].newest >= 3
    assert result.late == []
    assert rows[1].place == "end of Stop ranks"
    assert result.decision == f"reattempt after {Symptom.CRASH} SIGKILL, 1 attempt"
    assert result.leaked == []
