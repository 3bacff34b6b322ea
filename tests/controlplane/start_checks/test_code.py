"""The code of a starting job becomes its first version. Code outside its folder gives a warning."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from activities.versions.store import VersionStore
from controlplane.client import Control
from controlplane.job_file.job_file import load_job
from controlplane.start_checks.code import first_version, outside_code
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.version import JobVersion, VersionStatus


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "gpt/inner").mkdir(parents=True)
    (tmp_path / "gpt/inner/train.py").write_text("print(1)\n")
    (tmp_path / "gpt/lib.py").write_text("a = 1\n")
    return tmp_path / "gpt/inner/train.py"


def started(spec: JobSpec, url: str) -> tuple[JobSpec, list[JobVersion], str]:
    return asyncio.run(first_version(cast(Control, SimpleNamespace(versions_url=url)), spec))


def test_a_job_starts_with_a_snapshot_of_its_scripts_folder(script: Path, tmp_path: Path) -> None:
    spec = load_job(None, {"script": script, "args": ["--steps", "3"], "name": "gpt"}, {})
    runs, [first], note = started(spec, str(tmp_path / "versions"))
    assert note == ""
    assert (runs.script, runs.cwd, runs.version) == ("train.py", str(script.parent), 1)
    assert runs.args == ["--steps", "3"]
    assert (first.number, first.status, first.runs and first.runs.code) == (1, VersionStatus.RUNNING, runs.code)
    assert first.runs is not None
    assert first.runs.packages == {}
    store = VersionStore(str(tmp_path / "versions"))
    assert asyncio.run(store.full("gpt", first.runs)).packages["torch"]


def test_a_folder_of_a_job_file_is_relative_to_it(script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('script = "gpt/inner/train.py"\ncode = "gpt"\n')
    runs, _, _ = started(load_job(tmp_path / "job.toml", {}, {}), str(tmp_path / "versions"))
    assert runs.script == "inner/train.py"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x.py").write_text("1\n")
    wrong = load_job(tmp_path / "job.toml", {"code": tmp_path / "other"}, {})
    with pytest.raises(ConfigError, match="is not in the folder"):
        started(wrong, str(tmp_path / "versions"))


@pytest.mark.parametrize("url", ["versions", ""])
def test_in_place_the_script_runs_where_it_lies(url: str, script: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('script = "gpt/inner/train.py"\ncode = "in-place"\n')
    spec = load_job(tmp_path / "job.toml", {}, {})
    runs, versions, note = started(spec, str(tmp_path / url) if url else "")
    assert (runs.code, runs.script, runs.version, versions, note) == ("", str(script), 1, [], "")
    assert not (tmp_path / "versions").exists()


def test_without_a_store_it_runs_in_place_and_says_so(script: Path) -> None:
    spec = load_job(None, {"script": script}, {})
    runs, versions, note = started(spec, "")
    assert (runs.code, runs.script, versions) == ("", str(script), [])
    assert "EVERSTEP_VERSIONS" in note
    with pytest.raises(ConfigError, match="the store of versions is not known here"):
        started(spec.model_copy(update={"code": str(script.parent)}), "")


def test_a_number_is_not_for_a_user_to_give(script: Path) -> None:
    """Only everstep numbers versions."""
    with pytest.raises(ConfigError, match="unknown key 'version'"):
        load_job(None, {"script": script, "version": 3}, {})


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
    """Modules that are imported through PYTHONPATH are not in the snapshot, so there is a warning."""
    late, unused = module(tmp_path / "libs", "late"), module(tmp_path / "unused", "never")
    (tmp_path / "packages/helper").mkdir(parents=True)
    path = f"{unused}:{late}:{tmp_path}/packages:{tmp_path}/gone::{folder}"
    said = told(folder, PYTHONPATH=path)
    assert f"code in {late} (PYTHONPATH), {tmp_path}/packages (PYTHONPATH) is not part of the job's version" in said
    assert told(folder, PYTHONPATH=str(unused)) == told(folder) == ""
    assert told(folder, PYTHONPATH=str(module(tmp_path / "mine-too", "mine"))) == ""
    assert told(folder, PYTHONPATH=str(module(tmp_path / "v/site-packages", "late"))) == ""


def test_what_is_installed_as_a_link_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install is not in the snapshot, so there is a warning."""
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
    assert told(folder, python="/other/python") == ""  # it is unknown here which packages another Python has
    (info / "direct_url.json").write_text('{"url": 3, "dir_info": ["editable"]}')
    assert told(folder) == ""
