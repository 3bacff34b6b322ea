"""Versions of code: their ids, requests for a version, and hidden secrets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.redaction import HIDDEN
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, JobVersion, Origin, UpdateRequest, read_update

RUNS = CodeVersion(code="a" * 64, script="train.py", args=["--steps", "3"], env={"LR": "1", "HF_TOKEN": "hf_abc"})


def test_the_id_is_made_of_all_that_decides_what_runs_and_of_nothing_else() -> None:
    noted = {"packages": {"torch": "2"}, "origin": Origin(commit="1f"), "files": 3, "bytes": 9}
    assert RUNS.model_copy(update=noted).id == RUNS.id
    decides: dict[str, Any] = {
        "code": "b" * 64,
        "script": "other.py",
        "args": ["--steps", "4"],
        "cwd": "/data",
        "python": "/usr/bin/python3",
        "env": {"LR": "2"},
    }
    ids = {RUNS.model_copy(update={name: value}).id for name, value in decides.items()}
    assert len(ids | {RUNS.id}) == len(decides) + 1


@given(st.lists(st.text(max_size=5), max_size=4), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
def test_a_job_that_runs_a_version_says_so(args: list[str], env: dict[str, str]) -> None:
    version = RUNS.model_copy(update={"args": args, "env": env})
    spec = version.applied(JobSpec(name="gpt", script="/gpt/train.py"), 3)
    assert (CodeVersion.of(spec).id, spec.version) == (version.id, 3)


def test_no_secret_is_shown_of_a_version_or_of_what_asked_for_it() -> None:
    asked = UpdateRequest(env={"API_KEY": "s3cret", "LR": "2"}, made=RUNS)
    shown = JobVersion(number=2, runs=RUNS, request=asked, again=asked).without_secrets()
    text = shown.model_dump_json()
    assert "hf_abc" not in text
    assert "s3cret" not in text
    assert shown.runs is not None
    assert shown.runs.env == {"LR": "1", "HF_TOKEN": HIDDEN}
    assert "s3cret" in JobVersion(number=2, runs=RUNS, request=asked).model_dump_json()


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        (None, "send one object"),
        ({"code": "/x", "version": 2}, "exclude each other"),
        ({"rollback": True, "code": "/x"}, "rollback goes to a version"),
        ({"env": {"EVERSTEP_JOB": "x"}}, "is not a variable that a job can have"),
        ({"window_h": 0}, "greater than 0"),
        ({"version": -1}, "numbered from 1"),
        ({"urgency": "now"}, "it is lazy or urgent"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(typed: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as refused:
        read_update(typed)
    assert "\n" not in str(refused.value)


def test_a_revision_may_say_where_its_repository_is() -> None:
    request = read_update({"code": "/home/ada/gpt", "git": "main", "operator": "ada"})
    assert (request.code, request.git) == ("/home/ada/gpt", "main")
