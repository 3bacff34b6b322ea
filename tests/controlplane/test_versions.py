"""An update from a folder on the user's own computer. Its snapshot is made there, and not by a worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from activities.versions.make import first_version
from activities.versions.store import VersionStore
from controlplane.versions import made_here
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.version import JobVersion, UpdateRequest, VersionStatus


class Job:
    """A job that runs the first version of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder / "gpt", VersionStore(str(folder / "versions"))
        self.folder.mkdir()
        (self.folder / "train.py").write_text("print(1)\n")
        spec = JobSpec(name="gpt", script=str(self.folder / "train.py"), args=["--steps", "3"])
        runs = asyncio.run(first_version(spec, self.folder, self.store)).model_copy(update={"packages": {}})
        self.state = SimpleNamespace(
            spec=runs.applied(spec, 1), versions=[JobVersion(number=1, runs=runs, status=VersionStatus.RUNNING)]
        )
        self.url = self.store.url

    async def _state(self, job: str) -> object:
        return self.state

    def asked(self, **fields: object) -> tuple[UpdateRequest, str]:
        control: Any = SimpleNamespace(versions_url=self.url, state=self._state)
        request = UpdateRequest.model_validate({"operator": "ada", **fields})
        return asyncio.run(made_here(control, "gpt", request, lambda _: None))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_folder_is_sent_as_what_it_holds(job: Job, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.py").write_text("print(2)\n")
    request, note = job.asked(code=str(tmp_path / "mine"), args=["--steps", "5"])
    made = request.made
    assert made is not None
    assert (note, made.script, made.args, made.packages) == ("", "train.py", ["--steps", "5"], {})
    assert made.cwd == str(job.folder)
    assert asyncio.run(job.store.full("gpt", made)).packages["torch"]
    asyncio.run(job.store.code(made.code)).close()
    assert job.asked(code=str(tmp_path / "mine"), args=["--steps", "5"])[0] == request
    with pytest.raises(ConfigError, match=r"the script train.py is not among the files of"):
        (tmp_path / "mine/train.py").rename(tmp_path / "mine/other.py")
        job.asked(code=str(tmp_path / "mine"))


def test_what_is_not_here_workers_look_for(job: Job) -> None:
    """If the folder or the store is not known here, a worker makes the version."""
    request, note = job.asked(code="/nowhere/at/all")
    assert (request.made, note) == (
        None,
        "there is no folder /nowhere/at/all here: a worker reads it, as the worker sees it",
    )
    job.url = ""
    request, note = job.asked(code=str(job.folder))
    assert (request.made, "EVERSTEP_VERSIONS is not set here" in note) == (None, True)


@pytest.mark.parametrize("fields", [{"args": ["--steps", "9"]}, {"version": 1}, {"cancel": 1}, {"rollback": True}])
def test_where_no_folder_is_named_nothing_is_made_here(job: Job, fields: dict[str, object]) -> None:
    request, note = job.asked(**fields)
    assert (request.made, note) == (None, "")
