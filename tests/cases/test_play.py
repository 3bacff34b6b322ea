"""Every case is played in simulated time. Its recovery must take the course that the case expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console import main
from drills.cases.case import Case, read_case
from drills.cases.play import differences, play
from everstep.errors import ConfigError

FOLDER = Path(__file__).parent
CASES = sorted(FOLDER.glob("*.toml"))
KILLED = 'title = "a rank is killed"\n\n[[fault]]\nrank = 1\nsignal = 9\n'


def case(**fields: object) -> Case:
    return Case.model_validate({"title": "a case", "fault": [{"rank": 1, "signal": 9}]} | fields)


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_the_course_is_as_expected(path: Path) -> None:
    known = read_case(path)
    assert differences(known, play(known)) == []


def test_a_case_has_the_same_course_each_time() -> None:
    known = read_case(FOLDER / "gpu-memory-error.toml")
    assert play(known) == play(known)


def test_a_course_that_is_not_as_expected_names_each_difference() -> None:
    known = case(expect={"evicted": {"m1": "failed-test"}, "rungs": ["diagnose"], "within_s": 1, "incidents": 1})
    found = differences(known, play(known))
    assert [one.part for one in found] == ["evicted", "rungs", "within_s"]
    assert (found[0].expected, found[0].actual) == ("m1 (failed-test)", "none")


def test_an_eviction_that_is_not_expected_is_a_difference() -> None:
    known = case(fault=[{"machine": "m1", "silent": True}])
    assert [one.part for one in differences(known, play(known))] == ["evicted"]


def test_days_without_a_fault_are_skipped() -> None:
    course = play(case(job={"ran_h": 1000}))
    assert course.incidents == 1
    assert course.seconds is not None and course.seconds < 60


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("title = ", "cannot be read"),
        ('title = "x"\n', "fault"),
        (KILLED + "[expect]\nrung = []\n", "expect.rung"),
        ('title = "x"\n[[fault]]\nrank = 1\n', "it shows nothing"),
        (KILLED + "[job]\nmachines = 0\n", "job.machines"),
    ],
)
def test_a_file_that_is_no_case_is_refused_with_what_is_wrong(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "case.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as refused:
        read_case(path)
    assert str(path) in str(refused.value)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(["policy", "play", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_shows_the_course_and_says_whether_it_is_as_expected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(KILLED)
    bad.write_text(KILLED + '[expect]\nrungs = ["replay"]\n')

    assert run(capsys, str(good))[0] == 0
    code, out, _ = run(capsys, str(good), str(bad))
    assert code == 1
    assert "1 of 2 cases are as expected" in out
    code, out, _ = run(capsys, str(bad), "--json")
    [found] = json.loads(out)
    assert (code, found["rungs"], found["differences"][0]["part"]) == (1, ["reattempt"], "rungs")
    assert run(capsys, str(tmp_path / "none.toml"))[0] == 2
