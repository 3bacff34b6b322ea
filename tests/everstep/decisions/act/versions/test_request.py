"""The answers of a job to requests for another version of its code."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.next_version import next_version
from everstep.decisions.act.versions.request import answer_to
from everstep.model.incident import Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion, JobVersion, VersionStatus, read_update

ADA = {"rollback": True, "urgency": "urgent", "operator": "ada", "reason": "the loss is worse"}
BOB = {"rollback": True, "urgency": "urgent", "operator": "bob"}


def three() -> VersionBook:
    """Return a book in which version 3 runs. Versions 1 and 2 were steady before."""
    book = VersionBook(running=3)
    for number, (begin, end) in enumerate([(0, 100), (100, 900), (900, -1)], 1):
        ran = JobVersion(
            number=number,
            runs=CodeVersion(code=f"c{number}", script="t.py"),
            status=VersionStatus.REPLACED if end > 0 else VersionStatus.RUNNING,
            ranges=[(number, begin, end)],
            steady=end > 0,
            asked_ns=number,
        )
        book.put(ran)
    return book


def restart(book: VersionBook) -> None:
    """Let an incident launch the newest pending version."""
    failure = Failure(generation=3, step=950, symptom=Symptom.UPDATE, cause="update", time_ns=10)
    change = next_version(book, failure, RecoveryPolicy(), explained=False, by_operator=False)
    assert change is not None
    book.switch_to(change.number, suspect=change.suspect, now_ns=10)
    generation = 1 + max(one.ranges[-1][0] for one in book.versions.values() if one.ranges)
    book.launched(generation, 950, 10)


def back(book: VersionBook, request: dict[str, Any]) -> str:
    answer = answer_to(read_update(request), book, 20)
    return answer.text or f"refused: {answer.refused}"


def test_a_rollback_that_is_sent_twice_goes_back_once() -> None:
    book = three()
    assert back(book, ADA).startswith("the job goes back to v2")
    assert back(book, ADA).startswith("requested before: v2")
    restart(book)
    assert back(book, ADA).startswith("requested before: v2")
    assert back(book, ADA).endswith("runs; to go back further, name a version as well")
    assert (book.running, book.pending()) == (2, [])


def test_a_second_rollback_by_another_operator_is_refused() -> None:
    book = three()
    back(book, ADA)
    restart(book)
    refused = "refused: v3 was already rolled back, and v2 runs: to go back further, name a version as well"
    assert back(book, BOB) == refused
    assert book.pending() == []


def test_a_rollback_by_an_operator_after_one_by_a_rule_is_refused() -> None:
    book = three()
    book.switch_to(2, suspect="it failed before its first step", now_ns=10)  # the next generation is not launched yet
    assert back(book, BOB).startswith("refused: v3 was already rolled back")


def test_a_rollback_that_names_a_version_goes_back_further() -> None:
    book = three()
    back(book, ADA)
    restart(book)
    assert back(book, ADA | {"version": 1}).startswith("the job goes back to v1")


@pytest.mark.parametrize("again", [ADA, BOB])
def test_an_update_after_a_rollback_can_be_rolled_back_too(again: dict[str, Any]) -> None:
    book = three()
    back(book, ADA)
    restart(book)
    made = book.ask(read_update({"operator": "ada", "code": "/gpt"}), 30)
    book.change(made.number, runs=CodeVersion(code="c4", script="t.py"))
    book.wait_for_restart(made.number, 30)
    restart(book)
    assert book.running == 4
    assert back(book, again).startswith("the job goes back to v2")
