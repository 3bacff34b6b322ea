"""Laws of the pool's book, under any requests in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep.decisions.pool import book, poll
from everstep.model.pool import GiveBack, OperatorMove, PollAnswers, PoolPlace, Replaced, RunningJob
from tests.everstep.decisions.pool.test_book import S, evict, machine, pool, want


class BookLaws(RuleBasedStateMachine):
    """Leases, replacements, returns, polls and operators in any order. A map of machines to jobs checks the book."""

    def __init__(self) -> None:
        super().__init__()
        self.state = pool(5, standbys=1)
        self.now = 10
        self.has: dict[str, str] = {}
        """Machine → the job to which it was given."""
        self.answers: dict[str, Replaced] = {}

    def _tick(self) -> int:
        self.now += 100 * S
        return self.now

    @rule(job=st.sampled_from("abc"), numbers=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def lease(self, job: str, numbers: set[int]) -> None:
        leased = book.lease(self.state, want(job, *numbers), now_ns=self._tick())
        wanted = {f"m{number}" for number in numbers}
        taken = {name for name in wanted if self.has.get(name, job) != job}
        assert taken <= leased.refused.keys()
        if not leased.refused:
            self.has |= dict.fromkeys(wanted, job)

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        job = self.has[name]
        keep = tuple(int(one[1:]) for one, owner in self.has.items() if owner == job and one != name)
        request = evict(name, job, id=f"i/{self.now}", keep=keep)
        answer = book.replace(self.state, request, now_ns=self._tick())
        if answer.machines:
            (new,) = answer.machines.values()
            assert self.has.get(new.name) is None, "no job had the new machine"
            del self.has[name]
            self.has[new.name] = job
            self.answers[request.id] = answer
        assert book.replace(self.state, request, now_ns=self._tick()) == answer

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def not_fit(self, data: st.DataObject) -> None:
        """Report that the newest replacement is not fit."""
        [(old, new)] = list(self.answers.values())[-1].machines.items()
        job = self.has.get(new.name)
        if job is None:
            return
        keep = tuple(int(one[1:]) for one, owner in self.has.items() if owner == job and one != new.name)
        request = evict(new.name, job, id=f"i/{self.now}", keep=keep).model_copy(update={"back": {new.name: old}})
        answer = book.replace(self.state, request, now_ns=self._tick())
        if answer.machines:
            [came] = answer.machines.values()
            assert self.has.get(came.name) is None, "no job had the new machine"
            del self.has[new.name]
            self.has[came.name] = job
        assert book.replace(self.state, request, now_ns=self._tick()) == answer

    @rule(job=st.sampled_from("abc"))
    def give_back(self, job: str) -> None:
        book.give_back(self.state, GiveBack(job=job, run="1"), now_ns=self._tick())
        self.has = {name: owner for name, owner in self.has.items() if owner != job}

    @rule(number=st.integers(0, 6), out=st.booleans())
    def operator(self, number: int, out: bool) -> None:
        move = OperatorMove(machine=f"m{number}", operator="me")
        said = (book.operator_evicts if out else book.operator_releases)(self.state, move, now_ns=self._tick())
        assert bool(said) is (move.machine in self.state.machines)

    @rule(
        faults=st.sets(st.integers(0, 5)),
        cleaned=st.sets(st.integers(0, 5)),
        known=st.booleans(),
        late_s=st.sampled_from([1, 150]),
    )
    def look(self, faults: set[int], cleaned: set[int], known: bool, late_s: int) -> None:
        jobs = [
            RunningJob(
                job=job, run="1", machines=[machine(int(name[1:])) for name in self.has if self.has[name] == job]
            )
            for job in sorted(set(self.has.values()))
        ]
        looked = PollAnswers(
            machines=[machine(number) for number in range(5)],
            standbys=1,
            jobs=jobs if known else [],
            unknown=[] if known else sorted(set(self.has.values())),
            faults={f"m{number}": "xid-79" for number in faults},
            cleaned=[f"m{number}" for number in cleaned],
        )
        now = self._tick()
        poll.apply(self.state, looked, began_ns=now - late_s * S, now_ns=now, quarantine_s=300.0)

    @invariant()
    def who_was_given_a_machine_has_it(self) -> None:
        active = {name: one.job for name, one in self.state.machines.items() if one.place is PoolPlace.ACTIVE}
        assert active == self.has

    @invariant()
    def machines_out_of_use_are_nobodys(self) -> None:
        for name, one in self.state.machines.items():
            if one.place in {PoolPlace.QUARANTINED, PoolPlace.CORDONED}:
                assert name not in self.has
                assert book.lease(self.state.model_copy(deep=True), want("z", int(name[1:])), now_ns=self.now).refused


BookLaws.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestBookLaws = BookLaws.TestCase
