"""After how many steps ranks save: all of them move together, and always have a step in common."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.keep import save_pace
from everstep.decisions.keep.save_pace import Paced, PaceOrder, SaveSchedule, Turn, obeyed, order_pace, towards
from everstep.model.save_pace import SavePace
from everstep.slots.file import by_need
from everstep.slots.format import EMPTY

EACH = SavePace()


@dataclass
class Rank:
    """A rank as ``saver.py`` and ``SlotFile`` treat it: one save at a time, each into the least needed slot."""

    rank: int
    slots: list[int]
    completed: int
    asked: SavePace
    schedule: SaveSchedule
    shown: SavePace
    always: int
    """All ranks save after the multiples of this number at any pace; 0: there is no such number."""
    to_do: list[str] = field(default_factory=list)
    """What it still does before it begins the next body."""
    saving: tuple[int, int] | None = None
    """The slot and the step of the save that is not committed."""

    @property
    def steps(self) -> set[int]:
        return {step for step in self.slots if step != EMPTY}

    @property
    def body(self) -> int:
        """The newest body that it has begun."""
        return self.completed + (not self.to_do)

    def end_step(self) -> None:
        self.completed += 1
        always = self.always > 0 and self.completed % self.always == 0
        turn = self.schedule.end_step(self.completed, self.asked, always=always)
        self.to_do = (["wait", "save"] + ["wait"] * turn.waits + ["show"]) if turn.saves else []

    def advance(self) -> None:
        if self.to_do[0] == "wait" and self.saving:
            return
        done = self.to_do.pop(0)
        if done == "save":
            slot = by_need(self.slots, {})[0]
            self.slots[slot], self.saving = EMPTY, (slot, self.completed)
        elif done == "show":
            self.shown = self.schedule.pace

    def commit(self) -> None:
        if self.saving:
            slot, self.slots[slot] = self.saving[0], self.saving[1]
            self.saving = None


class Job:
    """Ranks with a collective in every step, two watchers, and messages that arrive at any time and in any order."""

    def __init__(
        self, choose: random.Random, *, ranks: int, slots: int, pace: SavePace, begins: int, always: int, most: int
    ) -> None:
        self.choose, self.most = choose, most
        self.ranks = [
            Rank(rank, [begins] + [EMPTY] * (slots - 1), begins, pace, SaveSchedule(pace), pace, always)
            for rank in range(ranks)
        ]
        self.seen = [{rank: Paced(rank, pace, pace, 1) for rank in range(ranks)} for _ in range(2)]
        self.orders: list[PaceOrder] = []
        self.widest = pace.every
        self.wanted = 8

    def act(self) -> None:
        rank, seen = self.choose.choice(self.ranks), self.choose.choice(self.seen)
        match self.choose.choices(["run", "commit", "show", "order", "deliver"], [10, 1, 4, 1, 5])[0]:
            case "run" if rank.to_do:
                rank.advance()
            case "run" if all(other.body > rank.completed for other in self.ranks):
                rank.end_step()
            case "commit":
                rank.commit()
            case "show":
                self.wanted = self.choose.choice([self.wanted] * 30 + [1, 2, 4, 8, 16])
                seen[rank.rank] = Paced(rank.rank, rank.asked, rank.shown, self.wanted)
            case "order":
                if order := order_pace(list(seen.values()), len(self.ranks), self.most):
                    self.orders.append(order)
            case "deliver" if self.orders:
                order = self.orders[-1] if self.choose.random() < 0.7 else self.choose.choice(self.orders)
                rank.asked = obeyed(rank.rank, rank.asked, order)
        self.widest = max(self.widest, *(rank.schedule.pace.every for rank in self.ranks))

    @property
    def common(self) -> set[int]:
        return set.intersection(*(rank.steps for rank in self.ranks))


def job_of(
    seed: int, *, ranks: int = 3, slots: int = 3, pace: SavePace = EACH, begins: int = 0, always: int = 0
) -> Job:
    return Job(random.Random(seed), ranks=ranks, slots=slots, pace=pace, begins=begins, always=always, most=16)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 3),
    slots=st.integers(3, 5),
    pace=st.sampled_from([EACH, SavePace(0, 4), SavePace(0, 10)]),
    begins=st.integers(0, 20),
    always=st.sampled_from([0, 3, 5, 12]),
)
def test_ranks_always_have_a_step_in_common(
    seed: int, ranks: int, slots: int, pace: SavePace, begins: int, always: int
) -> None:
    job = job_of(seed, ranks=ranks, slots=slots, pace=pace, begins=begins, always=always)
    for _ in range(1000):
        job.act()
        assert job.common, [(rank.steps, rank.completed, rank.schedule.pace) for rank in job.ranks]
        # A save that every rank has to have begun is the last but one: it is at most two distances old.
        assert max(rank.completed for rank in job.ranks) - max(job.common) <= 2 * job.widest


def test_the_jobs_of_that_law_move_and_would_break_it_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_step_in_common(seed: int) -> bool:
        job = job_of(seed)
        for _ in range(1000):
            job.act()
            if not job.common:
                return True
        return False

    def at_once(pace: SavePace, wanted: int) -> SavePace:
        return pace if wanted == pace.every else SavePace(pace.number + 1, wanted)

    assert not any(map(without_a_step_in_common, range(10)))
    monkeypatch.setattr(save_pace, "towards", at_once)
    assert any(map(without_a_step_in_common, range(10)))


def test_ranks_begin_to_wait_change_the_distance_and_end_waiting() -> None:
    pace, seen = EACH, []
    while (after := towards(pace, 4)) != pace:
        pace = after
        seen.append((pace.every, pace.waits))
    assert seen == [(1, True), (2, True), (4, True), (4, False)]
    assert pace.number == len(seen)


def test_while_ranks_change_to_fewer_saves_they_may_turn_back() -> None:
    assert towards(SavePace(3, 8, True), 2) == SavePace(4, 4, True)
    assert towards(SavePace(3, 8, True), 8) == SavePace(4, 8)


def shown(*paces: tuple[SavePace, SavePace], wanted: int = 4) -> list[Paced]:
    return [Paced(rank, asked, pace, wanted) for rank, (asked, pace) in enumerate(paces)]


def test_the_slowest_rank_decides() -> None:
    ranks = [Paced(0, EACH, EACH, 1), Paced(1, EACH, EACH, 8)]
    assert order_pace(ranks, 2, 32) == PaceOrder(EACH, SavePace(1, 1, True))


def test_nothing_is_said_at_the_pace_that_is_needed() -> None:
    assert order_pace(shown((EACH, EACH), (EACH, EACH), wanted=1), 2, 32) is None


def test_no_distance_is_above_the_largest_one() -> None:
    pace = SavePace(7, 4)
    assert order_pace(shown((pace, pace), wanted=64), 1, 4) is None


def test_no_rank_moves_while_a_rank_is_not_shown() -> None:
    assert order_pace(shown((EACH, EACH)), 2, 32) is None


def test_rank_0_moves_first_and_moves_again_when_all_ranks_have_followed() -> None:
    first = SavePace(1, 1, True)
    order = PaceOrder(EACH, first)
    assert obeyed(0, EACH, order) == first
    assert obeyed(1, EACH, order) == EACH
    assert order_pace(shown((first, EACH), (EACH, EACH)), 2, 32) == PaceOrder(first, first)
    assert obeyed(1, EACH, PaceOrder(first, first)) == first
    assert order_pace(shown((first, first), (first, first)), 2, 32) == PaceOrder(first, SavePace(2, 2, True))


def test_a_message_that_is_late_or_repeated_has_no_effect() -> None:
    first, second = SavePace(1, 1, True), SavePace(2, 2, True)
    for order in (PaceOrder(EACH, first), PaceOrder(first, second)):
        for rank in (0, 1):
            assert obeyed(rank, SavePace(2, 1), order) == SavePace(2, 1)
    assert obeyed(1, EACH, PaceOrder(second, second)) == EACH


def test_some_steps_are_saved_at_any_pace() -> None:
    schedule = SaveSchedule(SavePace(0, 4))
    assert not schedule.end_step(7, EACH).saves
    assert schedule.end_step(7, EACH, always=True).saves


def test_a_rank_moves_when_it_is_asked_and_saves_when_that_is_due() -> None:
    schedule, asked = SaveSchedule(SavePace(2, 1, True)), SavePace(3, 2, True)
    assert not schedule.end_step(7, asked).saves
    assert schedule.pace == asked
    assert schedule.end_step(8, asked) == Turn(saves=True, waits=True)
    assert schedule.end_step(9, EACH) == Turn(saves=False, waits=False), "an older request is ignored"
