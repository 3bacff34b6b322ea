"""An unfit replacement is replaced by the next machine. If there is none, the evicted machine stays in the job."""

from __future__ import annotations

from everstep.decisions.pool import book, poll
from everstep.model.pool import OperatorMove, PollAnswers, ReplaceRequest, RunningJob
from tests.everstep.decisions.pool.test_book import evict, machine, places, pool, want


def unfit(new: str, old: str, *, id: str = "i/2", keep: tuple[int, ...] = ()) -> ReplaceRequest:
    """Return a request for another machine. ``new``, which replaces ``old``, is unfit."""
    return evict(new, id=id, keep=keep).model_copy(update={"back": {new: old}})


def test_an_unfit_replacement_is_replaced_by_the_next_machine() -> None:
    state = pool(4, standbys=2)
    book.lease(state, want("gpt", 0, 1), now_ns=1)
    [new] = book.replace(state, evict("m1", keep=(0,)), now_ns=2).machines.values()
    answer = book.replace(state, unfit(new.name, "m1", keep=(0, 1)), now_ns=3)
    assert {old: one.name for old, one in answer.machines.items()} == {"m2": "m3"}
    assert places(state) == {"m0": "active gpt", "m1": "quarantined gpt", "m2": "quarantined gpt", "m3": "active gpt"}


def test_without_another_replacement_the_evicted_machine_stays() -> None:
    state = pool(3, standbys=1)
    book.lease(state, want("gpt", 0, 1), now_ns=1)
    book.operator_evicts(state, OperatorMove(machine="m1", operator="ada"), now_ns=2)
    book.replace(state, evict("m1", keep=(0,)), now_ns=2)
    there = RunningJob(job="gpt", run="1", machines=[machine(0), machine(1)])
    found = PollAnswers(jobs=[there], faults={"m1": "ranks of job gpt run there"})
    poll.apply(state, found, began_ns=3, now_ns=3)
    answer = book.replace(state, unfit("m2", "m1", keep=(0, 1)), now_ns=4)
    assert ({old: one.name for old, one in answer.machines.items()}, answer.why) == (
        {"m2": "m1"},
        "1 needed and 0 to spare",
    )
    assert places(state) == {"m0": "active gpt", "m1": "active gpt", "m2": "quarantined gpt"}
    back = state.machines["m1"]
    assert (back.job, back.run, back.evicted_ns, back.uncleaned, back.wanted_out) == ("gpt", "1", [], False, True)
    assert back.fault == ""
    assert state.short["gpt"].machines == 1, "gpt is short of one machine, so the cluster is asked for one"
    assert book.replace(state, unfit("m2", "m1", keep=(0, 1)), now_ns=5) == answer


def test_a_machine_that_was_cleaned_meanwhile_does_not_return() -> None:
    state = pool(3, standbys=1)
    book.lease(state, want("gpt", 0, 1), now_ns=1)
    book.replace(state, evict("m1", keep=(0,)), now_ns=2)
    poll.apply(
        state,
        PollAnswers(jobs=[RunningJob(job="gpt", run="1", machines=[machine(0), machine(2)])], cleaned=["m1"]),
        began_ns=3,
        now_ns=4,
    )
    assert book.replace(state, unfit("m2", "m1", keep=(0, 1)), now_ns=5).machines == {}
    assert places(state) == {"m0": "active gpt", "m1": "quarantined gpt", "m2": "active gpt"}
