"""The benchmark on a GPU, on a machine without one: what runs, what is left out and why, and what failures leave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import PARTS, Line, Part, named

LOOK: dict[str, Any] = {"packages": gpu.PACKAGES, "python": "3.11", "torch": "2.15", "gpu": ""}


def run_slowly(part: Part) -> list[Line]:
    """Run a part as on a machine without a GPU, and without its time limit, since other tests run beside it."""
    return gpu.run(replace(part, limit_s=600), sys.executable, LOOK)


def test_all_parts_together_end_within_nine_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) <= 9 * 60
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", [part for part in PARTS if not part.needs_gpu], ids=lambda part: part.name)
@pytest.mark.timeout(600)
def test_parts_that_need_no_gpu_run_small(part: Part) -> None:
    lines = run_slowly(part)
    assert len(lines) > 0 and all(line.value is not None for line in lines), lines
    if part.name == "law of restores":
        assert {line.name for line in lines[1:]} <= {"restored runs: undisturbed", "restored runs: as with torch"}


def test_other_parts_say_that_they_need_a_gpu() -> None:
    for part in PARTS:
        if part.needs_gpu:
            (line,) = gpu.run(part, sys.executable, LOOK)
            assert (line.value, line.why) == (None, "needs a GPU")


def test_a_python_that_lacks_packages_leaves_out_only_what_needs_them() -> None:
    look = LOOK | {"packages": ["torch", "numpy", "xxhash"], "gpu": "H200"}
    assert gpu.why_not(named("kill-rank"), look).startswith("needs grpc, pydantic, sqlalchemy, temporalio, typer")
    assert [part.name for part in PARTS if gpu.why_not(part, look)] == ["kill-rank"]
    assert [part.name for part in PARTS if not gpu.why_not(part, look | {"packages": ["torch"]})] == ["Xid"]
    assert all(gpu.why_not(part, look | {"packages": []}) for part in PARTS)


def test_a_part_that_fails_or_takes_too_long_is_a_row_that_says_why() -> None:
    failing = Part("law of restores", 60, "laws", needs_gpu=False)
    (line,) = gpu.run(replace(failing, name="no such part"), sys.executable, LOOK)
    assert line.value is None and line.why.startswith("failed with exit code 1: ValueError: there is no part")
    line = gpu.run(replace(failing, limit_s=0), sys.executable, LOOK)[-1]
    assert line.value is None and line.why.startswith("did not end within 0 s")


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--json", str(file), "--part", "pinning and copies"]
    done = subprocess.run(command, cwd=gpu.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows = json.loads(file.read_text())["rows"]
    assert {row["part"] for row in rows} == {"pinning and copies"}
    assert all(row["name"] in done.stdout for row in rows)


def test_a_wrong_python_or_part_is_refused() -> None:
    for option, value in (("--python", "/no/such/python"), ("--part", "nothing")):
        command = [sys.executable, "-P", "-m", "benchmarks.gpu", option, value]
        done = subprocess.run(command, cwd=gpu.ROOT, check=False, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2 and value in done.stderr
