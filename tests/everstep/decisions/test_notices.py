"""The events about which receivers are notified, and the ids of these events."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from everstep.decisions.notices import (
    TEXT_CHARACTERS,
    EndedJob,
    PacedJob,
    ended_job_notices,
    incident_notices,
    lasting_notices,
    pool_notices,
    saves_changed_notices,
)
from everstep.model.machine import Machine
from everstep.model.notice import Notice, NoticeKind
from everstep.model.pool import PoolMachine, PoolPlace, PoolState
from everstep.model.save_pace import SavePace
from everstep.model.stage import CurrentStage, Stage

S, H = 10**9, 3600 * 10**9
NOON = 1_790_000_000 * S
INCIDENT = "incident/gpt/0001"


def at_hand(name: str = Stage.PARKED, **more: object) -> CurrentStage:
    fields = {"name": name, "seconds": 0.0, "found": "no common checkpoint", "job": "gpt", "since_ns": NOON} | more
    return CurrentStage.model_validate(fields)


def machine(
    name: str, place: PoolPlace, since_ns: int = NOON - H, *, evicted_ns: tuple[int, ...] = (), fault: str = ""
) -> PoolMachine:
    return PoolMachine(
        machine=Machine(name=name, address=f"{name}:1"),
        place=place,
        since_ns=since_ns,
        evicted_ns=list(evicted_ns),
        fault=fault,
        why="a GPU is lost" if place is PoolPlace.QUARANTINED else "",
    )


def pool(*machines: PoolMachine, standbys: int = 2, known: bool = True) -> PoolState:
    return PoolState(machines={one.machine.name: one for one in machines}, standbys=standbys, known=known)


def kinds(notices: list[Notice]) -> list[NoticeKind]:
    return [one.kind for one in notices]


def test_a_parked_job_has_a_notice_with_its_reason_and_the_commands_to_use() -> None:
    (one,) = incident_notices(INCIDENT, at_hand(machines=["m1"]))

    assert (one.kind, one.job, one.incident, one.machines) == (NoticeKind.PARKED, "gpt", INCIDENT, ["m1"])
    assert "no common checkpoint" in one.text
    assert "everstep resume gpt" in one.text
    assert one.time_ns == NOON


@pytest.mark.parametrize("letters", [1, 20, 30])
def test_a_long_reason_is_cut_and_the_commands_are_not(letters: int) -> None:
    job = "j" * letters
    (one,) = incident_notices(INCIDENT, at_hand(job=job, found="no room " * 100))

    assert TEXT_CHARACTERS - 2 <= len(one.text) <= TEXT_CHARACTERS
    assert one.text.endswith(f"everstep abandon {job}")


def test_the_same_parking_has_one_id_and_the_next_one_another() -> None:
    (first,), (again,) = (
        incident_notices(INCIDENT, at_hand()),
        incident_notices(INCIDENT, at_hand(found="the same, longer")),
    )
    (next_one,) = incident_notices(INCIDENT, at_hand(since_ns=NOON + S))

    assert first.id == again.id == f"parked/{INCIDENT}/20260921-141320.000"
    assert next_one.id != first.id


def test_an_incident_that_is_not_parked_is_no_event() -> None:
    assert incident_notices(INCIDENT, at_hand(Stage.REATTEMPT)) == []


def test_the_breaker_has_one_notice_in_an_incident_whether_the_job_is_parked_or_not() -> None:
    parked = incident_notices(INCIDENT, at_hand(tripped="3 machines of 8 would be evicted", opened_ns=NOON))
    observed = incident_notices(INCIDENT, at_hand(Stage.OBSERVED, tripped="4 of 8", opened_ns=NOON, since_ns=NOON + S))

    assert kinds(parked) == [NoticeKind.PARKED, NoticeKind.BREAKER_TRIPPED]
    assert kinds(observed) == [NoticeKind.BREAKER_TRIPPED]
    assert parked[1].id == observed[0].id
    assert "3 machines of 8" in parked[1].text


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (EndedJob("gpt", "r", NOON, "failed", "gpt was not started: no room"), "no room"),
        (EndedJob("gpt", "r", NOON, closed_as="it was terminated"), "it was terminated"),
        (EndedJob("gpt", "r", NOON, "finished", "gpt finished"), ""),
        (EndedJob("gpt", "r", NOON, "stopped", "gpt stopped by ada"), ""),
        (EndedJob("gpt", "r", NOON), ""),
        (EndedJob("gpt", "r", NOON - 7 * H, "failed", "long ago"), ""),
    ],
)
def test_only_a_job_that_failed_or_was_closed_from_outside_has_a_notice(job: EndedJob, text: str) -> None:
    notices = ended_job_notices(job, NOON + S)

    assert kinds(notices) == ([NoticeKind.JOB_FAILED] if text else [])
    assert all(text in notice.text and notice.job == "gpt" for notice in notices)


def test_two_runs_of_a_name_are_two_events() -> None:
    first, second = (ended_job_notices(EndedJob("gpt", run, NOON, "failed", "x"), NOON)[0].id for run in "ab")

    assert first != second


def test_a_pool_with_all_its_standbys_is_no_event() -> None:
    full = pool(machine("m1", PoolPlace.ACTIVE), machine("m2", PoolPlace.STANDBY), machine("m3", PoolPlace.STANDBY))

    assert pool_notices(full, NOON) == []
    assert pool_notices(pool(machine("m1", PoolPlace.ACTIVE), standbys=0), NOON) == []


def test_a_pool_with_too_few_standbys_and_a_pool_without_any() -> None:
    gone = machine("m1", PoolPlace.QUARANTINED, NOON)
    (short,) = pool_notices(pool(gone, machine("m2", PoolPlace.STANDBY)), NOON)
    (empty,) = pool_notices(pool(gone, machine("m2", PoolPlace.STANDBY, fault="it does not answer")), NOON)

    assert (short.kind, short.machines) == (NoticeKind.POOL_SHORT, ["m1"])
    assert "1 of 2" in short.text
    assert "m1 (a GPU is lost)" in short.text
    assert (empty.kind, empty.machines) == (NoticeKind.POOL_EMPTY, ["m1", "m2"])
    assert "m2 (it does not answer)" in empty.text


def test_a_shortage_is_one_event_until_another_machine_is_lost() -> None:
    spare, gone = machine("m2", PoolPlace.STANDBY), machine("m1", PoolPlace.QUARANTINED, NOON)
    (first,) = pool_notices(pool(gone, spare, machine("m3", PoolPlace.FREE), standbys=3), NOON)
    (later,) = pool_notices(
        pool(gone, spare, machine("m3", PoolPlace.FREE), machine("m4", PoolPlace.ACTIVE, NOON + S), standbys=3), NOON
    )
    (worse,) = pool_notices(pool(gone, spare, machine("m3", PoolPlace.QUARANTINED, NOON + S), standbys=3), NOON)

    assert first.id == later.id
    assert worse.id != first.id


def test_a_pool_that_does_not_know_its_jobs_yet_has_no_notice() -> None:
    assert pool_notices(pool(known=False), NOON) == []


def test_a_machine_that_is_evicted_again_within_a_day_has_a_notice() -> None:
    once = machine("m1", PoolPlace.STANDBY, evicted_ns=(NOON,))
    twice = machine("m1", PoolPlace.QUARANTINED, evicted_ns=(NOON - H, NOON))
    slowly = machine("m1", PoolPlace.STANDBY, evicted_ns=(NOON - 25 * H, NOON))

    assert pool_notices(pool(once, standbys=0), NOON) == pool_notices(pool(slowly, standbys=0), NOON) == []
    (notice,) = pool_notices(pool(twice, standbys=0), NOON)
    assert (notice.kind, notice.machines) == (NoticeKind.EVICTED_TWICE, ["m1"])
    assert "2 times" in notice.text
    assert pool_notices(pool(twice, standbys=0), NOON + 7 * H) == [], (
        "the last eviction was 7 hours ago, which is too long"
    )


def test_only_a_shortage_has_to_last() -> None:
    seen = pool_notices(pool(machine("m1", PoolPlace.QUARANTINED, NOON, evicted_ns=(NOON - H, NOON))), NOON)
    since, due = lasting_notices({}, seen, 100.0, 60.0)
    assert kinds(due) == [NoticeKind.EVICTED_TWICE]

    since, due = lasting_notices(since, seen, 159.0, 60.0)
    assert kinds(due) == [NoticeKind.EVICTED_TWICE]
    again, due = lasting_notices(since, seen, 160.0, 60.0)
    assert kinds(due) == [NoticeKind.POOL_EMPTY, NoticeKind.EVICTED_TWICE]
    assert again == since

    over, _ = lasting_notices(since, [], 161.0, 60.0)
    assert over == {}, "after a shortage is over, the next one has to last again"


def test_a_receiver_gets_one_line_of_json() -> None:
    (notice,) = incident_notices(INCIDENT, at_hand(found="é" * 900 + "\n"))
    body = notice.body()
    assert body.endswith(b"\n")
    assert body.count(b"\n") == 1
    fields = json.loads(body)

    assert list(fields) == ["kind", "id", "time", "text", "cluster", "job", "incident", "machines", "link"]
    assert fields["kind"] == "parked"
    assert fields["time"] == "2026-09-21T14:13:20.000+00:00"
    assert len(fields["text"]) <= 500
    assert "everstep abandon gpt" in fields["text"], "the text is cut, but not the commands in it"


def test_a_job_that_saves_after_another_number_of_steps_has_a_notice_with_the_times() -> None:
    job = PacedJob("gpt", 3, SavePace(4, 8), save_s=4.2, step_s=0.6)
    (one,) = saves_changed_notices(job, NOON)
    assert (one.kind, one.job) == (NoticeKind.SAVES_CHANGED, "gpt")
    assert "saves every 8 steps: a save takes 4.2 s, a step 0.6 s; a fault costs at most 16 steps" in one.text
    assert one.id == saves_changed_notices(replace(job, save_s=5.0), NOON + 1)[0].id
    assert one.id != saves_changed_notices(replace(job, pace=SavePace(7, 4)), NOON)[0].id


@pytest.mark.parametrize("pace", [SavePace(0, 8), SavePace(3, 8, True)])
def test_a_generation_that_begins_and_ranks_that_change_have_no_notice(pace: SavePace) -> None:
    assert saves_changed_notices(PacedJob("gpt", 3, pace, save_s=4.2, step_s=0.6), NOON) == []
