"""The lines that a drill adds to a job's script for an update."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drills.faults.updates import BadVersion, Update
from drills.inject.new_code import AT_START, write
from everstep.errors import CannotInject
from everstep.model.job import IN_PLACE, JobSpec

SCRIPT = '"""Trains.\n\nWell.\n"""\n\nfrom __future__ import annotations\n\nimport json\n\nprint(json.dumps(1))\n'


def job(script: Path, code: str = "") -> JobSpec:
    return JobSpec(name="gpt", script=str(script), code=code)


@pytest.mark.parametrize("code", ["", IN_PLACE])
def test_the_lines_come_after_the_docstring_and_the_future(code: str, tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    (source / "model.py").write_text("WIDTH = 3\n")
    write(job(source / "train.py", code), tmp_path / "new", "print(2)", "the second")
    assert (tmp_path / "new" / "model.py").read_text() == "WIDTH = 3\n"
    assert (tmp_path / "new" / "train.py").read_text() == SCRIPT.replace(
        "annotations\n", "annotations\n# the second\nprint(2)\n"
    )
    ran = subprocess.run([sys.executable, tmp_path / "new" / "train.py"], capture_output=True, text=True, check=True)
    assert ran.stdout == "2\n1\n"
    assert (source / "train.py").read_text() == SCRIPT


def test_the_folder_that_the_job_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "code/inner").mkdir(parents=True)
    (tmp_path / "code/inner/train.py").write_text("print(1)\n")
    (tmp_path / "code/lib.py").write_text("WIDTH = 3\n")
    write(job(tmp_path / "code/inner/train.py", str(tmp_path / "code")), tmp_path / "new", "print(2)", "x")
    assert (tmp_path / "new/inner/train.py").read_text() == "# x\nprint(2)\nprint(1)\n"
    assert (tmp_path / "new/lib.py").read_text() == "WIDTH = 3\n"


def test_what_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def (")
    with pytest.raises(CannotInject, match=r"train\.py is no valid Python"):
        write(job(tmp_path / "train.py"), tmp_path / "new", AT_START, "")


def test_each_bad_version_has_its_own_lines() -> None:
    kinds: list[dict[str, Any]] = [{"at_start": True}, {"fails_after": 0}, {"fails_after": 5}, {"changes_state": True}]
    found = [BadVersion.model_validate(kind).lines for kind in kinds]
    assert len(set(found)) == len(kinds)
    assert Update().lines == ""
    for lines in found:
        compile(lines, "lines", "exec")
