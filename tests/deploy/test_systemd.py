"""The units of systemd give agents and workers what the code needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent.needs import NEEDS, Need, StartedBy
from tests.deploy.unit import AGENT, WORKER, settings


@pytest.mark.parametrize("need", [need for need in NEEDS if StartedBy.UNIT in need.lines], ids=lambda need: need.name)
def test_the_unit_has_each_line_that_the_doctor_asks_for(need: Need) -> None:
    name, value = need.lines[StartedBy.UNIT].split("=")

    assert value in settings(AGENT)[name]


def test_ranks_outlive_their_agent() -> None:
    assert settings(AGENT)["KillMode"] == ["process"]


@pytest.mark.parametrize("unit", [AGENT, WORKER], ids=lambda unit: unit.stem)
def test_a_process_that_ends_again_and_again_is_started_again(unit: Path) -> None:
    found = settings(unit)

    assert (found["Restart"], found["StartLimitIntervalSec"]) == (["always"], ["0"])


@pytest.mark.parametrize("name", ["CapabilityBoundingSet", "NoNewPrivileges", "PrivateDevices", "ProtectKernelLogs"])
def test_nothing_takes_from_ranks_what_cuda_needs_or_hides_the_kernel_log(name: str) -> None:
    assert name not in settings(AGENT)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", [AGENT, WORKER], ids=lambda unit: unit.stem)
def test_systemd_understands_every_line(unit: Path, tmp_path: Path) -> None:
    program, copy = tmp_path / "everstep", tmp_path / unit.name
    program.touch(mode=0o755)
    copy.write_text(unit.read_text().replace("/opt/everstep/bin/everstep", str(program)))

    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)

    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
