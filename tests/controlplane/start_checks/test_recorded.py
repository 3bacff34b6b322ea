"""A job starts with a recorded version: how the version is found, and whether the job repeats an earlier run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from activities.ledger.ledger import Ledger
from activities.versions.packages import packages_of
from activities.versions.snapshot import folder_snapshot
from activities.versions.store import VersionStore
from controlplane.start_checks.recorded import RecordedStart, recorded_version
from everstep.errors import ConfigError, NoSuchJob, VersionStoreError
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, JobVersion, Origin, VersionStatus

SPEC = JobSpec(name="gpt", script="/gone/train.py", args=["--now"], machines=2, env={"LR": "0.5"})


class Recorded:
    """A store with two versions of a job. The job's last run knows both."""

    def __init__(self, folder: Path) -> None:
        self.store = VersionStore(str(folder / "versions"))
        self.known: list[JobVersion] | None = []
        self.kept: Ledger | None = None
        (folder / "code").mkdir()
        for number, ranges in enumerate([[(1, 0, 20), (3, 40, -1)], [(2, 20, 40)]], start=1):
            (folder / "code/train.py").write_text(f"print({number})\n")
            with folder_snapshot(folder / "code") as made:
                runs = CodeVersion(
                    code=made.digest,
                    script="train.py",
                    args=[str(number)],
                    cwd="/data",
                    env={"LR": "0.1"},
                    packages=packages_of("") | {"torch": "1.0"},
                    origin=Origin(folder="/home/ada/gpt", commit="1f3870be" * 5, dirty=True),
                )
                asyncio.run(self.store.put("gpt", runs, made))
            bare = runs.model_copy(update={"packages": {}})
            self.known.append(JobVersion(number=number, runs=bare, status=VersionStatus.REPLACED, ranges=ranges))

    def started(self, named: str, step: int | None = None) -> RecordedStart:
        control: Any = SimpleNamespace(versions_url=self.store.url, state=self.state, ledger=self.ledger)
        return asyncio.run(recorded_version(control, SPEC, named, step))

    async def state(self, job: str) -> object:
        if self.known is None:
            raise NoSuchJob(job)
        return SimpleNamespace(versions=self.known)

    async def ledger(self) -> Ledger | None:
        return self.kept

    def id(self, number: int) -> str:
        assert self.known is not None
        runs = self.known[number - 1].runs
        assert runs is not None
        return runs.id


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


@pytest.mark.parametrize("by", ["number", "v", "id", "short id"])
def test_a_job_runs_a_recorded_version_by_number_or_id(by: str, recorded: Recorded) -> None:
    named = {"number": "2", "v": "v2", "id": recorded.id(2), "short id": recorded.id(2)[:12]}[by]
    start = recorded.started(named, 30)
    spec, [first] = start.spec, start.versions
    assert (spec.script, spec.args, spec.cwd, spec.env) == ("train.py", ["2"], "/data", {"LR": "0.1"})
    assert (spec.version, spec.machines) == (1, 2)
    assert (first.number, first.status, first.runs and first.runs.id) == (1, VersionStatus.RUNNING, recorded.id(2))
    assert first.runs is not None
    assert first.runs.packages == {}
    assert first.request.reason == f"repeats v2 ({recorded.id(2)[:12]}) from step 30"
    assert start.notes[0] == (f"code: v2 ({recorded.id(2)[:12]}), of /home/ada/gpt, commit 1f3870be1f38 with changes")


@pytest.mark.parametrize(
    ("number", "step", "repeats"),
    [(1, 0, True), (1, 19, True), (1, 20, False), (1, 40, True), (1, 1000, True), (2, 20, True), (2, 40, False)],
)
def test_only_a_version_that_ran_at_the_step_repeats_it(
    number: int, step: int, repeats: bool, recorded: Recorded
) -> None:
    said = "\n".join(recorded.started(str(number), step).notes)
    assert ("do not repeat its steps" not in said) is repeats
    if not repeats and number == 1:
        assert "ran from step 0 to 20, from step 40 on" in said


def test_changed_packages_are_a_warning(recorded: Recorded) -> None:
    [_, warning] = recorded.started("1").notes
    assert warning.startswith("warning: packages have changed since the version was recorded: torch 1.0 -> ")


def test_a_version_of_an_older_run_is_found_only_by_its_id(recorded: Recorded) -> None:
    older, recorded.known = recorded.id(2), None
    assert "this version ran no step, so the steps from 30 on" in "".join(recorded.started(older, 30).notes)
    with pytest.raises(ConfigError, match="the last run of gpt has no v2; the versions of its last run are not known"):
        recorded.started("2")


def test_versions_that_temporal_forgot_are_read_from_the_ledger(recorded: Recorded, tmp_path: Path) -> None:
    known, recorded.known = recorded.known, None
    assert known is not None
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as recorded.kept:
        recorded.kept.job_started(SPEC, started_ns=1)
        recorded.kept.versions_seen("gpt", known, seen_ns=2)
        start = recorded.started("2", 30)
    assert start.spec.args == ["2"]
    assert start.notes[0].startswith("code: v2 (")


def test_an_unknown_version_is_refused_with_a_list_of_known_ones(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match=r"the last run of gpt has no v7; there are v1 \(\w{12}\), v2 \(\w{12}\)"):
        recorded.started("7")
    with pytest.raises(ConfigError, match=r"version 0000000 of job gpt is not in the store .*; there are v1"):
        recorded.started("0000000")
    for nonsense in ("", "0", "latest", "ABCDEF0", "-1", "3.5", "abc"):
        with pytest.raises(ConfigError, match="is not a version: give its number"):
            recorded.started(nonsense)


def test_a_short_id_that_also_names_a_damaged_record_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    folder = tmp_path / "versions/jobs/gpt"
    [file, _] = sorted(folder.iterdir())
    (folder / (file.name[:8] + "0" * 56 + file.name[64:])).write_bytes(file.read_bytes())
    with pytest.raises(VersionStoreError, match="is damaged: its content is another version"):
        recorded.started(file.name[:8])


def test_removed_code_is_an_error(recorded: Recorded, tmp_path: Path) -> None:
    for file in (tmp_path / "versions/code").iterdir():
        file.unlink()
    with pytest.raises(VersionStoreError, match="is not in the store of versions"):
        recorded.started("1", 10)


def test_a_version_that_ran_in_place_cannot_be_repeated(recorded: Recorded) -> None:
    runs = CodeVersion(script="/home/ada/train.py")
    asyncio.run(recorded.store.put("gpt", runs, None))
    with pytest.raises(ConfigError, match=r"version \w{12} ran in place, from /home/ada/train.py"):
        recorded.started(runs.id[:12])


def test_a_recorded_version_needs_a_store() -> None:
    control: Any = SimpleNamespace(versions_url="")
    with pytest.raises(ConfigError, match="set EVERSTEP_VERSIONS to the value that the workers have"):
        asyncio.run(recorded_version(control, SPEC, "1", None))
