"""The book of a job's versions: it stays consistent under requests in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep.decisions.act.versions.book import KEPT, WAITS, VersionBook
from everstep.decisions.act.versions.next_version import is_withdrawn, next_version
from everstep.decisions.act.versions.request import answer_to
from everstep.model.incident import Failure, Symptom
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion, UpdateRequest, Urgency, VersionStatus

SPEC = JobSpec(name="gpt", script="/gpt/train.py")
POLICY = RecoveryPolicy()
S = 10**9


def code(name: int) -> CodeVersion:
    return CodeVersion(code=f"{name:064d}", script="train.py")


def asked(name: int, **fields: object) -> UpdateRequest:
    return UpdateRequest.model_validate({"operator": "ada", "made": code(name), **fields})


class Books(RuleBasedStateMachine):
    """The versions of a job, as its workflow and its incidents record them."""

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.generation, self.step = VersionBook(), S, 0, 0

    def later(self) -> int:
        self.now += S
        return self.now

    @initialize()
    def begin(self) -> None:
        self.book.add_first(SPEC, self.now)
        self.launch()

    def launch(self) -> None:
        self.generation += 1
        self.book.launched(self.generation, self.step, self.later())

    @rule(name=st.integers(1, 4), urgent=st.booleans(), fit=st.booleans())
    def ask(self, name: int, urgent: bool, fit: bool) -> None:
        request = asked(name, urgency=Urgency.URGENT if urgent else Urgency.LAZY)
        answer = answer_to(request, self.book, self.later())
        if answer.to_make and fit:
            self.book.wait_for_restart(answer.to_make, self.now)
        elif answer.to_make:
            self.book.refuse(answer.to_make, "ImportError")

    @rule(number=st.integers(0, 8), back=st.booleans())
    def ask_for_a_version_of_the_job(self, number: int, back: bool) -> None:
        answer_to(UpdateRequest(operator="bob", version=number, rollback=back or not number), self.book, self.later())

    @rule(number=st.integers(1, 8))
    def withdraw(self, number: int) -> None:
        answer_to(UpdateRequest(operator="bob", cancel=number), self.book, self.later())

    @rule(steps=st.integers(0, 40), symptom=st.sampled_from(list(Symptom)), by_operator=st.booleans())
    def fail(self, steps: int, symptom: Symptom, by_operator: bool) -> None:
        self.step += steps
        failure = Failure(
            generation=self.generation, step=self.step, symptom=symptom, cause="KeyError", time_ns=self.later()
        )
        self.book.record_progress(failure, POLICY)
        self.book.count_failure()
        pending = self.book.pending()
        change = next_version(self.book, failure, POLICY, explained=False, by_operator=by_operator)
        if pending:
            assert change is not None
            assert change.number == pending[-1].number
        if change is not None:
            assert change.number != self.book.running
            self.book.switch_to(change.number, suspect=change.suspect, now_ns=self.now)
            assert not self.book.pending(), "the newest pending version runs now, and it supersedes all others"
        self.launch()

    @precondition(lambda self: self.book.versions)
    @rule()
    def carry_over(self) -> None:
        self.book = VersionBook.of(self.book.all(), self.book.running)

    @invariant()
    def statuses_and_ranges_agree(self) -> None:
        book = self.book
        running = [one.number for one in book.versions.values() if one.status is VersionStatus.RUNNING]
        assert running == ([book.running] if book.versions else [])
        assert not running or book.versions[book.running].ranges[-1][2] < 0
        open_ones = [one for one in book.versions.values() if one.ranges and one.ranges[-1][2] < 0]
        assert [one.number for one in open_ones] == ([book.running] if book.versions else [])
        for one in book.versions.values():
            assert (one.due_ns > 0) == (one.status is VersionStatus.PENDING)
            assert one.status is not VersionStatus.REFUSED or not one.ranges
            assert all(end < 0 or begin <= end for _, begin, end in one.ranges)


TestBooks = Books.TestCase


@given(st.integers(0, 120))
def test_the_number_of_versions_is_bounded_and_needed_versions_stay(count: int) -> None:
    book = VersionBook()
    book.add_first(SPEC, S)
    book.launched(1, 0, S)
    for number in range(count):
        made = book.ask(asked(number + 10), (number + 2) * S)
        book.refuse(made.number, "ImportError")
    waits = book.ask(asked(5), 1000 * S)
    kept = book.all()
    assert len(kept) <= KEPT
    assert {1, waits.number} <= {one.number for one in kept}


def test_a_repeated_request_makes_no_second_version() -> None:
    book = VersionBook()
    book.add_first(SPEC, S)
    request = asked(3)
    first = answer_to(request, book, 2 * S)
    again = answer_to(request, book, 3 * S)
    assert (first.to_make, again.to_make, again.refused) == (2, 0, "")
    assert again.text.startswith("requested before: v2")
    assert sum(version.status in WAITS for version in book.versions.values()) == 1


@given(ran=st.booleans(), withdrawn=st.booleans())
def test_a_withdrawal_between_decision_and_launch_is_seen(ran: bool, withdrawn: bool) -> None:
    """The same is true for a version that ran before."""
    book = VersionBook()
    book.add_first(SPEC, S)
    book.launched(1, 0, S)
    made = book.ask(asked(2), 2 * S)
    if ran:
        book.switch_to(made.number, now_ns=3 * S)
        book.launched(2, 10, 3 * S)
    request = UpdateRequest(operator="bob", version=1) if ran else None
    book.wait_for_restart(1 if ran else made.number, 4 * S, request)
    failure = Failure(generation=2, step=20, symptom=Symptom.CRASH, cause="SIGKILL", time_ns=5 * S)
    change = next_version(book, failure, POLICY, explained=True, by_operator=False)
    assert change is not None
    if withdrawn:
        answer_to(UpdateRequest(operator="bob", cancel=change.number), book, 6 * S)
    assert is_withdrawn(change, book) is withdrawn


def test_a_rollback_by_a_rule_is_never_withdrawn() -> None:
    book = VersionBook()
    book.add_first(SPEC, S)
    book.launched(1, 0, S)
    book.switch_to(book.ask(asked(2), 2 * S).number, now_ns=3 * S)
    book.launched(2, 10, 3 * S)
    failure = Failure(generation=2, step=10, symptom=Symptom.EXCEPTION, cause="KeyError", time_ns=5 * S)
    change = next_version(book, failure, POLICY, explained=False, by_operator=False)
    assert change is not None
    assert (change.number, is_withdrawn(change, book)) == (1, False)


def test_the_number_of_waiting_versions_is_limited() -> None:
    book = VersionBook()
    book.add_first(SPEC, S)
    answers = [answer_to(asked(number), book, number * S) for number in range(2, 14)]
    assert [bool(answer.refused) for answer in answers] == [False] * 10 + [True] * 2


def test_the_end_of_a_job_ends_the_running_version_and_withdraws_requested_versions() -> None:
    book = VersionBook()
    book.add_first(SPEC, S)
    book.launched(1, 0, S)
    for name in (1, 2, 3):
        book.ask(asked(name), S)
    book.wait_for_restart(2, S)
    book.refuse(3, "no module")
    book.end("the job finished")
    found = [(one.number, one.status, one.why, one.ended) for one in book.all()]
    assert found == [
        (1, "running", "", "the job finished"),
        (2, "withdrawn", "the job finished", ""),
        (3, "refused", "no module", ""),
        (4, "withdrawn", "the job finished", ""),
    ]
    book.end("the job finished")
    assert [(one.number, one.status, one.why, one.ended) for one in book.all()] == found
