"""Code that a snapshot leaves out is told before the job starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from controlplane.start_checks.outside import outside_code
from everstep.model.job import JobSpec

MAIN = "import os, torch.nn\nfrom helper.parts import x\nimport mine\nif True:\n    import late, other.one as o\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "gpt"
    found.mkdir()
    (found / "train.py").write_text(MAIN)
    (found / "mine.py").write_text("")
    return found


def told(folder: Path, python: str = "", **env: str) -> str:
    return outside_code(JobSpec(name="gpt", script=str(folder / "train.py"), env=env, python=python), folder)


def module(place: Path, name: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.py").write_text("")
    return place


def test_what_pythonpath_finds_is_told(folder: Path, tmp_path: Path) -> None:
    late, unused = module(tmp_path / "libs", "late"), module(tmp_path / "unused", "never")
    (tmp_path / "packages/helper").mkdir(parents=True)
    path = f"{unused}:{late}:{tmp_path}/packages:{tmp_path}/gone::{folder}"
    said = told(folder, PYTHONPATH=path)
    assert f"code in {late} (PYTHONPATH), {tmp_path}/packages (PYTHONPATH) is no part of its version" in said
    assert told(folder, PYTHONPATH=str(unused)) == told(folder) == ""
    assert told(folder, PYTHONPATH=str(module(tmp_path / "mine-too", "mine"))) == ""
    assert told(folder, PYTHONPATH=str(module(tmp_path / "v/site-packages", "late"))) == ""


def test_what_is_installed_as_a_link_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = module(tmp_path / "work/src", "other")
    info = tmp_path / "site/other_kit-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-kit\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    assert told(folder) == ""
    for editable in (False, True):
        url = {"url": f"file://{tmp_path}/work", "dir_info": {"editable": editable}}
        (info / "direct_url.json").write_text(json.dumps(url))
        assert (f"{source} (other-kit, an editable install)" in told(folder)) is editable
    assert told(folder, python="/other/python") == ""  # nobody knows here what that one has
    (info / "direct_url.json").write_text('{"url": 3, "dir_info": ["editable"]}')
    assert told(folder) == ""
