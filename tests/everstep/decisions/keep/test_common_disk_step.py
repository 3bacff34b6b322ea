"""What may be concluded from what machines say of the steps on their disks."""

from __future__ import annotations

from everstep.decisions.keep.disk_schedule import Agreed, StepsOnDisk, agree, newest_of_all


def stored(*steps: int, passed: int = 0, kept: int = 0, settled: int = 0) -> StepsOnDisk:
    return StepsOnDisk(frozenset(steps), passed, kept, settled)


def test_the_newest_step_that_all_have_need_not_be_the_newest_of_any() -> None:
    disks = [stored(10, 20, 40), stored(20, 30)]
    assert newest_of_all(disks) == 20
    assert agree(disks, 2) == Agreed(keep=20)
    assert newest_of_all([]) == 0


def test_of_a_part_of_the_ranks_nothing_is_concluded() -> None:
    assert agree([stored(10, passed=20)], 2) == Agreed()


def test_a_step_is_settled_when_all_keep_it() -> None:
    one, other = stored(10, kept=10), stored(10, 20)
    assert agree([one, other], 2) == Agreed(keep=10)
    assert agree([one, stored(10, 20, kept=10)], 2) == Agreed(keep=10, settled=10)
    assert agree([one, stored(20, kept=10)], 2).settled == 0, "it said so, and lost it"
    assert agree([one, stored(20, kept=20, settled=20)], 2).settled == 20, "another watcher saw that"


def test_what_some_keep_is_named_until_it_is_settled_or_gone() -> None:
    some = [stored(10, 20, kept=10), stored(10, 20)]
    assert agree(some, 2) == Agreed(keep=10), "20 comes after it"
    gone = [stored(10, 20, kept=10), stored(20, passed=20)]
    assert agree(gone, 2) == Agreed(keep=20, gone=(10,))


def test_a_step_is_gone_when_a_rank_passed_it() -> None:
    assert agree([stored(10, 20, 30), stored(passed=20)], 2).gone == (10, 20)
    assert agree([stored(10, 20, 30), stored(10)], 2).gone == (), "an older agent does not say what it passed"
