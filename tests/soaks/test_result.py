"""The result of a soak: what counts as survived, its text, and the journal with which a resumed soak continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soaks import report
from soaks.draw import draw
from soaks.result import EpisodeResult, Journal, PartResult, SoakResult
from soaks.runner import Soak

GOOD = EpisodeResult(number=1, meeting="kill-rank", kinds=["kill-rank"], recovered_s=1.25, steps_lost=1)
ABSORBED = EpisodeResult(number=2, meeting="kill-agent with hang-peer", kinds=["kill-agent", "hang-peer"])
UNFIRED = EpisodeResult(number=3, meeting="kill-peer", kinds=["kill-peer"], not_fired=["fault 1: no backup was caught"])
VIOLATED = EpisodeResult(
    number=4,
    meeting="raise within kill-rank",
    kinds=["kill-rank", "raise"],
    recovered_s=3.0,
    violations=["losses are equal: rank 1 has another loss at step [33]"],
)


def result(*episodes: EpisodeResult) -> SoakResult:
    return SoakResult(seed=7, planned=10, episodes=list(episodes))


def test_a_fault_that_did_not_fire_counts_as_tried_and_not_as_survived() -> None:
    found = result(GOOD, ABSORBED, UNFIRED)
    assert found.ok
    told = found.summary()
    assert (told["faults_tried"], told["faults_survived"], told["not_fired"]) == (4, 3, 1)
    assert (found.tried["kill-peer"], found.survived["kill-peer"]) == (1, 0)
    assert (told["recovered_s_median"], told["recovered_s_max"], told["meetings"]) == (1.25, 1.25, 2)


def test_a_soak_with_any_violation_fails() -> None:
    assert not result(GOOD, VIOLATED).ok
    assert result(GOOD, VIOLATED).survived["kill-rank"] == 1
    at_the_end = result(GOOD)
    at_the_end.violations.append("nothing is left behind: process 12")
    assert not at_the_end.ok and at_the_end.summary()["violated"] == 1


def test_the_json_has_the_episodes_and_figures() -> None:
    told = json.loads(report.as_json(result(GOOD, VIOLATED)))
    assert [one["number"] for one in told["episodes"]] == [1, 4]
    assert told["by_kind"]["kill-rank"] == {"tried": 2, "survived": 1}
    assert (told["ok"], told["violated"], told["episodes_run"]) == (False, 1, 2)
    assert SoakResult.model_validate(told) == result(GOOD, VIOLATED), "another process must be able to read the result"


def test_the_text_has_violations_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(GOOD, ABSORBED, UNFIRED, VIOLATED)
    found.reduced, found.kept = [4], "/tmp/home/clusters/drill-1"
    for one in found.episodes:
        report.each(one, found)
    report.show(found, tmp_path)
    shown = capsys.readouterr()
    for text in ("kill-rank: back in 1.2 s, 1 step lost", "absorbed", "did not fire: fault 1", "VIOLATED: losses are"):
        assert text in shown.err
    flat = " ".join(shown.out.split())
    assert "3 of 6 faults survived, of 10 planned; 1 did not fire" in flat
    assert "episode 4 (raise within kill-rank): losses are equal: rank 1 has another loss at step [33]" in flat
    assert f"python -P -m soaks soak --plan {tmp_path / 'reduced.json'}" in shown.out.replace("\n", "")
    assert "down --cluster drill-1 --purge" in flat


def test_an_incompletely_written_episode_counts_as_not_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.read() == ([], [])
    journal.add(GOOD)
    journal.add(ABSORBED)
    with journal.path.open("a") as file:
        file.write('{"number": 3, "meet')
    assert journal.read() == ([GOOD, ABSORBED], [])
    end = PartResult(setting="one job", violations=["the job ends: not within 120 s"])
    for one in (UNFIRED, end):
        journal.add(one)
    assert journal.read() == ([GOOD, ABSORBED, UNFIRED], [end]), (
        "an incomplete line is removed before another line is added"
    )
    again = ABSORBED.model_copy(update={"seconds": 2.0})
    journal.add(again)
    assert journal.read() == ([GOOD, again, UNFIRED], [end])


def rest_of(folder: Path, *done: EpisodeResult | PartResult) -> list[int]:
    soak = Soak(draw(4, 40), folder)
    for one in done:
        soak.journal.add(one)
    episodes, ends = soak.journal.read()
    return [one.number for one in soak.rest(episodes, {one.setting for one in ends}).episodes]


def test_a_resumed_soak_checks_the_end_of_every_job(tmp_path: Path) -> None:
    plan = draw(4, 40)
    of = {setting: [one.number for one in part.episodes] for setting, part in plan.parts()}
    assert len(of) > 1
    every = [EpisodeResult(number=one.number, meeting="", kinds=[]) for one in plan.episodes]
    ends = [PartResult(setting=setting) for setting in of]
    assert rest_of(tmp_path / "new") == [one.number for one in plan.episodes]
    assert rest_of(tmp_path / "cut", *every[:3]) == [one.number for one in plan.episodes[3:]]
    assert rest_of(tmp_path / "unended", *every, *ends[1:]) == of["one job"][-1:], (
        "the end of the soak's job was not checked, so one more episode runs before this check"
    )
    assert rest_of(tmp_path / "whole", *every, *ends) == []
