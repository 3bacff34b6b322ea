"""``everstep versions`` for jobs that are still in the ledger, but no longer in Temporal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from console import main
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, JobVersion, UpdateRequest, VersionStatus

S = 10**9


def version(number: int, status: VersionStatus, **more: object) -> JobVersion:
    runs = CodeVersion(code="ab" * 32, script="train.py", args=[str(number)])
    request = UpdateRequest(operator="ada", reason=f"reason {number}")
    return JobVersion(number=number, runs=runs, request=request, status=status, asked_ns=S).model_copy(update=more)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a ledger with two runs of a job. There is no cluster."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    url = f"sqlite:///{tmp_path}/ledger.db"
    spec = JobSpec(name="gpt", script="/gpt.py")
    with Ledger.open(url) as opened:
        opened.job_started(spec, started_ns=S)
        opened.versions_seen("gpt", [version(1, VersionStatus.REPLACED, ranges=[(1, 0, 9)])], seen_ns=2 * S)
        opened.job_ended("gpt", ended_ns=3 * S, outcome="stopped by bob")
        opened.job_started(spec, started_ns=4 * S)
        ended = version(1, VersionStatus.RUNNING, ranges=[(1, 20, -1)], ended="the job finished after 0 incidents")
        refused = version(2, VersionStatus.REFUSED, why="Traceback\nModuleNotFoundError: no module")
        opened.versions_seen("gpt", [ended, refused], seen_ns=5 * S)
    return url


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["versions", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_temporal_the_newest_run_is_shown(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "gpt", "--ledger", ledger)
    assert code == 0, err
    _, first, second = out.splitlines()[:3]
    assert first.split()[2:5] == ["ended", "from", "20"]
    assert "refused" in second
    code, out, _ = said(capsys, "gpt", "2", "--ledger", ledger)
    assert (code, "ModuleNotFoundError: no module" in out, "by ada" in out) == (0, True, True)
    assert said(capsys, "gpt", "7", "--ledger", ledger)[0] == 2


def test_all_runs_are_shown_separately(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "gpt", "--all", "--ledger", ledger)
    assert code == 0
    runs = [line for line in out.splitlines() if line.startswith("run of ")]
    assert len(runs) == 2
    assert runs[0].endswith(", stopped by bob")
    found = json.loads(said(capsys, "gpt", "--all", "--json", "--ledger", ledger)[1])
    assert [(one["run_started_ns"], one["number"]) for one in found] == [(S, 1), (4 * S, 1), (4 * S, 2)]
    assert said(capsys, "gpt", "2", "--all", "--ledger", ledger)[0] == 2


def test_an_unknown_job_is_an_error(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "gtp", "--ledger", ledger)
    assert (code, "the ledger has no job 'gtp'; it has: gpt" in err) == (1, True)
