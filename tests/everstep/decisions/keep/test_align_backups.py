"""The rule of alignment: when machines are aligned and on which step, and what happens after their reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from everstep.decisions.keep.align_backups import (
    BEHIND_S,
    CALM,
    GIVEN_UP_S,
    MOST_LEAD_S,
    NO_NAMED_STEP,
    Aligned,
    AlignRule,
    Backed,
)

TICK_S = 0.5


class Job:
    """A watcher's view of two ranks that save a step each second."""

    def __init__(self, *, every: int = 1) -> None:
        self.rule = AlignRule(2, every)
        self.tick = 0
        self.ranks = [Backed(rank, 0, 0, named=NO_NAMED_STEP, whole=0, calm=0, failing=False) for rank in (0, 1)]
        self.keeps_up = [True, True]

    def set(self, rank: int, **fields: Any) -> None:
        self.ranks[rank] = replace(self.ranks[rank], **fields)

    def look(self) -> Aligned | None:
        self.tick += 1
        for rank in (0, 1):
            self.set(rank, own_step=self.tick // 2)
            if self.keeps_up[rank]:
                self.set(rank, backup_step=self.tick // 2)
        return self.rule.observe(self.ranks, round(self.tick * TICK_S * 1e9))

    def until_told(self) -> Aligned:
        for _ in range(40):
            if found := self.look():
                return found
        raise AssertionError("no name was told")

    def adopt(self, aligned: Aligned, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.set(rank, named=aligned.named, whole=aligned.whole)

    def back_up(self, aligned: Aligned) -> None:
        self.keeps_up = [False, False]
        while self.tick // 2 < aligned.named:
            self.look()
        for rank in (0, 1):
            self.set(rank, backup_step=aligned.named)


def test_for_machines_that_keep_up_no_step_is_named() -> None:
    job = Job()
    assert [job.look() for _ in range(100)] == [None] * 100


def test_a_machine_that_falls_behind_aligns_all_on_a_coming_step() -> None:
    job = Job()
    for _ in range(10):
        job.look()
    job.keeps_up[1] = False
    told = job.until_told()
    assert job.tick * TICK_S - 6 >= BEHIND_S, "backups of two later steps were due for long enough"
    assert told == Aligned(whole=0, settled=0, named=job.tick // 2 + 2)
    assert job.look() == told, "the name is repeated until it is adopted"


def test_backups_that_are_due_less_often_are_not_late() -> None:
    job = Job(every=20)
    for _ in range(10):
        job.look()
    job.keeps_up = [False, False]
    assert [job.look() for _ in range(40)] == [None] * 40


def aligned() -> tuple[Job, Aligned]:
    job = Job()
    job.look()
    job.keeps_up[1] = False
    told = job.until_told()
    return job, told


def test_a_step_is_complete_when_every_rank_adopted_it_and_has_it() -> None:
    job, first = aligned()
    job.adopt(first, 0)
    assert job.look() == replace(first, settled=first.named - 1), "the name is repeated for rank 1"
    job.adopt(first, 1)
    assert job.look() is None, "both ranks have adopted the step"
    job.back_up(first)
    job.set(1, backup_step=first.named - 1)
    assert job.look() is None, "rank 1 has not backed up the step"
    job.set(1, backup_step=first.named)
    second = job.until_told()
    assert (second.whole, second.settled) == (first.named, first.named)
    assert second.named > job.ranks[0].own_step


def test_a_step_that_some_rank_passed_is_given_up() -> None:
    job, first = aligned()
    job.adopt(first, 0)
    job.keeps_up = [False, False]
    while job.tick // 2 < first.named - 1:
        found = job.look()
        assert found is not None and found.named == first.named
    job.look()
    second = job.until_told()
    assert (second.whole, second.settled) == (0, first.named), "rank 1 passed the step without adopting it"
    assert second.named > first.named


def test_no_step_is_named_while_the_job_hangs() -> None:
    """The named step is given up once. While the job hangs, no other step is named, since no rank would reach it."""
    job, first = aligned()
    job.adopt(first)
    own = job.ranks[0].own_step

    def stand() -> Aligned | None:
        job.tick += 1
        return job.rule.observe(job.ranks, round(job.tick * TICK_S * 1e9))

    told = [stand() for _ in range(20)]
    free = Aligned(whole=0, settled=first.named - 1, named=NO_NAMED_STEP)
    assert {one for one in told if one} == {free}
    for rank in (0, 1):
        job.set(rank, named=NO_NAMED_STEP, whole=0, own_step=own)
    assert [stand() for _ in range(20)] == [None] * 20
    job.keeps_up = [True, False]
    assert job.until_told().named > first.named - 1, (
        "after the hang, a machine that is behind aligns all machines again"
    )


def test_a_new_watcher_continues_from_what_ranks_report() -> None:
    job, first = aligned()
    job.adopt(first)
    job.back_up(first)
    second = job.until_told()
    job.adopt(second, 0)
    job.rule = AlignRule(2)  # rank 1 does not know yet that the first step is complete
    told = job.until_told()
    assert told == Aligned(whole=first.named, settled=second.named - 1, named=second.named)


def test_a_complete_step_counts_only_for_ranks_that_were_aligned_on_it() -> None:
    job, first = aligned()
    job.adopt(first)
    job.back_up(first)
    second = job.until_told()
    job.adopt(second, 0)
    job.rule = AlignRule(2)
    job.set(1, named=first.named + 1, whole=0)  # rank 1 was not aligned when the first step became complete
    assert job.look() == Aligned(0, second.named - 1, second.named)


def test_machines_are_free_again_when_all_keep_up_for_a_while() -> None:
    job, told = aligned()
    for _ in range(CALM):
        assert told.named != NO_NAMED_STEP
        job.adopt(told)
        job.back_up(told)
        for rank in (0, 1):
            job.set(rank, calm=job.ranks[rank].calm + 1)
        told = job.until_told()
    free = Aligned(whole=0, settled=job.ranks[0].named, named=NO_NAMED_STEP)
    assert told == free
    job.set(0, named=NO_NAMED_STEP, whole=0)
    job.keeps_up = [True, False]
    assert AlignRule(2).observe(job.ranks, 0) == free, "a new watcher comes to the same result"
    assert job.look() == free
    job.set(1, named=NO_NAMED_STEP, whole=0)
    job.keeps_up = [True, True]
    assert [job.look() for _ in range(10)] == [None] * 10


def test_machines_stay_aligned_while_one_is_slow() -> None:
    job, told = aligned()
    for _ in range(3 * CALM):
        job.adopt(told)
        job.back_up(told)
        job.set(0, calm=job.ranks[0].calm + 1)
        told = job.until_told()
        assert told.named != NO_NAMED_STEP


def test_the_wait_for_a_rank_with_failing_backups_is_limited() -> None:
    job, first = aligned()
    job.adopt(first)
    job.back_up(first)
    job.set(1, backup_step=0, failing=True)
    began = job.tick
    second = job.until_told()
    assert (job.tick - began) * TICK_S >= GIVEN_UP_S
    assert second.whole == first.named, "the rank still has the step in its own memory"


def test_failing_backups_do_not_align_machines() -> None:
    job = Job()
    job.look()
    job.keeps_up[1] = False
    job.set(1, failing=True)
    assert [job.look() for _ in range(60)] == [None] * 60


def test_no_step_is_named_while_some_ranks_are_unknown() -> None:
    job, first = aligned()
    job.ranks[1] = replace(job.ranks[1], own_step=-1)
    assert job.rule.observe(job.ranks, 10**12) is None
    assert job.rule.observe(job.ranks[:1], 10**12) is None
    assert first.named


def test_one_late_backup_does_not_align_machines() -> None:
    """The first backup may be late, because it waits for memory at the peer."""
    job, told = Job(), []
    for tick in range(10):
        for rank in (0, 1):
            job.set(rank, own_step=min(tick, 1), backup_step=-1)
        told.append(job.rule.observe(job.ranks, tick * 10**9))
    assert told == [None] * 10


def test_if_a_named_step_was_missed_the_next_one_is_further_ahead() -> None:
    job, first = aligned()
    ahead = first.named - job.ranks[0].own_step
    leads = []
    for _ in range(6):
        job.keeps_up = [False, False]
        named = first.named
        while (found := job.look()) is None or found.named == named:
            pass
        first = found
        leads.append(first.named - job.ranks[0].own_step)
    assert ahead < leads[0] < leads[1]
    assert leads[-1] in {MOST_LEAD_S, MOST_LEAD_S + 1}, "with steps of about a second, the lead has a limit"
    for _ in range(40):
        job.adopt(first)
        job.back_up(first)
        first = job.until_told()
    assert first.named - job.ranks[0].own_step == ahead
