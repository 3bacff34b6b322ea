"""Versions are made from real folders and git repositories, and put into a real store. Their changes are described."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from temporalio.exceptions import ApplicationError

from activities.make_version import MakeVersion, VersionMade
from activities.versions import changes, make
from activities.versions.make import changed, first_version, next_version
from activities.versions.store import VersionStore
from everstep.base.redaction import PATTERNS
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, UpdateRequest
from tests.activities.performing import perform
from tests.activities.versions.repository import Repository

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class Project:
    """A git repository with a script and a module, a store, and a job that runs the first version of this code."""

    def __init__(self, folder: Path) -> None:
        self.repository = Repository(folder / "gpt")
        self.repository.write(train_py="import lib\n", lib_py="".join(f"a{n} = {n}\n" for n in range(20)))
        self.commit = self.repository.commit("First")
        self.folder = self.repository.folder
        self.store = VersionStore(str(folder / "versions"))
        self.spec = JobSpec(
            name="gpt", script=str(self.folder / "train.py"), args=["--steps", "300"], env={"LR": "0.1"}
        )
        self.first = run(first_version(self.spec, self.folder, self.store))

    def next(self, running: CodeVersion | None = None, **request: Any) -> CodeVersion:
        return run(next_version("gpt", running or self.first, UpdateRequest(**request), self.store))

    def told(self, before: CodeVersion, after: CodeVersion) -> str:
        return run(changed(before, after, self.store, PATTERNS))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_first_version_has_the_current_files_of_the_folder(project: Project) -> None:
    first = project.first
    assert (first.script, first.cwd, first.files) == ("train.py", str(project.folder), 2)
    assert first.cwd_by_default
    assert (first.origin.commit, first.origin.folder, first.origin.dirty) == (
        project.commit,
        str(project.folder),
        False,
    )
    assert first.packages["torch"]
    assert first.args == ["--steps", "300"]
    with run(project.store.code(first.code)) as code:
        assert [file.path for file in code.files] == ["lib.py", "train.py"]
    assert run(project.store.full("gpt", first.model_copy(update={"packages": {}}))) == first


def test_a_script_in_a_subfolder_with_another_working_directory(project: Project, tmp_path: Path) -> None:
    project.repository.write(sub__deep_py="1")
    spec = project.spec.model_copy(update={"script": str(project.folder / "sub/deep.py"), "cwd": str(tmp_path)})
    made = run(first_version(spec, project.folder, project.store))
    assert (made.script, made.cwd, made.cwd_by_default) == ("sub/deep.py", str(tmp_path), False)
    with pytest.raises(ConfigError, match=r"is not in the folder .*: name a folder that has both"):
        run(first_version(project.spec, project.folder / "sub", project.store))


def test_a_script_that_git_ignores_is_refused(project: Project) -> None:
    project.repository.write(_gitignore="train_*.py\n", train__py="1")
    (project.folder / "train_2.py").write_text("1")
    spec = project.spec.model_copy(update={"script": str(project.folder / "train_2.py")})
    with pytest.raises(ConfigError, match=r"train_2\.py is not among the files .*: did you mean train\.py"):
        run(first_version(spec, project.folder, project.store))


def test_a_version_from_the_current_files_of_a_folder(project: Project) -> None:
    project.repository.write(train_py="import lib\nprint(2)\n", more_py="1\n2\n")
    made = project.next(code=str(project.folder))
    assert (made.script, made.cwd, made.args, made.env) == (
        "train.py",
        str(project.folder),
        ["--steps", "300"],
        {"LR": "0.1"},
    )
    assert (made.origin.commit, made.origin.dirty, made.files) == (project.commit, True, 3)
    text = project.told(project.first, made)
    assert text.splitlines()[0] == (
        f"1 file changed: train.py +1; 1 file added: more.py +2; its files differ from commit {project.commit[:12]}"
    )
    assert text.endswith("\n+print(2)")
    assert "--- /dev/null\n+++ more.py\n" in text


def test_a_version_from_a_git_revision_of_the_jobs_folder(project: Project) -> None:
    (project.folder / "lib.py").unlink()
    project.repository.write(train_py="print(1)\n")
    second = project.repository.commit("Second: less code")
    project.repository.write(train_py="an edit that nobody asked for\n")
    made = project.next(git="HEAD")
    assert (made.origin.commit, made.origin.dirty, made.origin.subject) == (second, False, "Second: less code")
    first_line = project.told(project.first, made).splitlines()[0]
    assert first_line.startswith("1 file changed: train.py +1 -1; 1 file removed: lib.py -20; commits ")
    assert "Second: less code (Ada)" in first_line
    back = project.next(made, git=project.commit)
    assert back.id == project.first.id
    assert "1 commits are removed" in project.told(made, back)


def test_other_arguments_variables_or_script_with_the_same_code(project: Project) -> None:
    made = project.next(args=["--steps", "500", "--seed", "3"], env={"LR": "0.2", "HF_TOKEN": "abcdef", "X": ""})
    assert made.code == project.first.code
    assert made.env == {"LR": "0.2", "HF_TOKEN": "abcdef", "X": ""}
    assert project.told(project.first, made) == (
        "arguments --steps 300 -> --steps 500 --seed 3; "
        "variables HF_TOKEN none -> (hidden), LR 0.1 -> 0.2, X none -> ''"
    )
    assert project.next(script="lib.py").script == "lib.py"
    with pytest.raises(ConfigError, match=r"has no libs\.py: did you mean lib\.py"):
        project.next(script="libs.py")
    assert project.next().id == project.first.id


def test_a_job_changes_from_in_place_to_a_snapshot(project: Project) -> None:
    in_place = CodeVersion.of(project.spec)
    made = project.next(in_place, code=str(project.folder))
    assert (made.script, made.cwd) == ("train.py", str(project.folder))
    assert project.told(in_place, made) == f"it runs code {made.code[:12]} instead of in place ({project.spec.script})"
    assert project.next(in_place, git="HEAD").code == made.code
    elsewhere = Repository(project.folder.parent / "other")
    elsewhere.write(train_py="1")
    moved = project.next(in_place, code=str(elsewhere.folder))
    assert (moved.cwd, moved.cwd_by_default) == (str(project.folder), True)
    with pytest.raises(ConfigError, match="give the absolute path of the script"):
        project.next(in_place, script="lib.py")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"code": "/nowhere/at/all"}, "there is no folder /nowhere/at/all here"),
        ({"git": "nothing"}, "has no revision 'nothing'"),
        ({"code": "FOLDER", "script": "other.py"}, "other.py is not among the files"),
        ({"code": "FOLDER", "script": "../x.py"}, "is not in the folder"),
    ],
)
def test_the_error_says_why_a_version_cannot_be_made(project: Project, request_: dict[str, str], said: str) -> None:
    request: dict[str, Any] = {name: value.replace("FOLDER", str(project.folder)) for name, value in request_.items()}
    with pytest.raises(ConfigError, match=said):
        project.next(**request)


def test_a_folder_on_hanging_storage_is_given_up(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "STORAGE_S", 0.2)
    hangs = asyncio.Event()
    monkeypatch.setattr(make, "folder_snapshot", lambda *_: asyncio.run(hangs.wait()))
    with pytest.raises(ConfigError, match=r"has not answered for 0\.2 s"):
        project.next(code=str(project.folder))


def test_the_description_of_changes_is_bounded(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(70):
        (project.folder / f"file-{number:02d}.py").write_text(f"{number}\n" * 400)
    (project.folder / "image.png").write_bytes(b"\0" * 1000)
    made = project.next(
        code=str(project.folder), args=[f"--{n}" for n in range(300)], env={f"V{n}": "x" * 500 for n in range(99)}
    )
    text = project.told(project.first, made)
    assert text.startswith("71 files added: file-00.py +400, file-01.py +400")
    assert "and 63 more" in text
    assert len(text) <= changes.SUMMARY_CHARACTERS + changes.PATCH_CHARACTERS + 10
    monkeypatch.setattr(changes, "COMPARED_LINES", 10)
    assert "file-00.py, file-01.py" in project.told(project.first, made)


def test_secrets_in_code_are_not_shown(project: Project) -> None:
    project.repository.write(train_py='import lib\npassword = "hunter2"\nurl = "https://me:hunter2@host"\n')
    text = project.told(project.first, project.next(code=str(project.folder)))
    assert "password" in text
    assert "hunter2" not in text


def test_changed_packages_are_shown(project: Project) -> None:
    other = project.first.model_copy(update={"packages": project.first.packages | {"torch": "9.9"}})
    torch = project.first.packages["torch"]
    assert project.told(project.first, other) == f"packages torch {torch} -> 9.9"


def made_by_a_worker(project: Project, store: VersionStore | None, **given: Any) -> VersionMade:
    spec = project.first.applied(project.spec, 1)
    running = project.first.model_copy(update={"packages": {}})
    request = UpdateRequest(**given.pop("request"))
    given = {"job": spec.name, "redact": spec.redact, "number": 2, "running": running, "request": request, **given}
    return run(perform(MakeVersion(**given), versions=store))


def test_a_version_made_by_a_worker_has_its_packages_only_in_the_store(project: Project) -> None:
    project.repository.write(train_py="print(2)\n")
    made = made_by_a_worker(project, project.store, request={"code": str(project.folder)})
    assert made.runs.packages == {}
    assert made.changed.startswith("1 file changed: train.py +1 -1")
    assert run(project.store.full("gpt", made.runs)).packages == project.first.packages
    again = made_by_a_worker(project, project.store, request={"code": str(project.folder)}, needed=[project.first.id])
    assert again == made


def test_a_version_that_a_command_made_is_used_unchanged(project: Project) -> None:
    project.repository.write(train_py="print(3)\n")
    here = project.next(code=str(project.folder))
    made = made_by_a_worker(project, project.store, request={"made": here.model_copy(update={"packages": {}})})
    assert made.runs.id == here.id
    assert made.changed.startswith("1 file changed")


def test_without_a_store_only_arguments_and_variables_change(project: Project) -> None:
    made = made_by_a_worker(project, None, request={"args": ["--steps", "1"]})
    assert made.runs.args == ["--steps", "1"]
    with pytest.raises(ApplicationError, match="there is no store of versions") as refused:
        made_by_a_worker(project, None, request={"code": str(project.folder)})
    assert refused.value.non_retryable


def test_a_missing_store_is_retried_and_a_wrong_folder_is_not(project: Project, tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away/code").write_text("a file where a folder has to be")
    with pytest.raises(ApplicationError) as away:
        made_by_a_worker(project, VersionStore(str(tmp_path / "away")), request={"code": str(project.folder)})
    assert (away.value.type, away.value.non_retryable) == ("VersionStoreError", False)
    with pytest.raises(ApplicationError, match=r"there is no folder /\S+ on \S+, a worker's host") as wrong:
        made_by_a_worker(project, project.store, request={"code": "/nowhere"})
    assert wrong.value.non_retryable
