"""Machines that the cluster does not list any more."""

from __future__ import annotations

from everstep.decisions.pool import book, poll
from everstep.model.pool import OperatorMove, PollAnswers, PoolState
from tests.everstep.decisions.pool.test_book import HOUR, evict, machine, places, pool, running, want


def dead(**evict_more: str) -> PoolState:
    """Return a pool in which m1 died, was evicted and is no longer in the list. m3 has replaced it."""
    state = pool(3, standbys=1)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    request = evict("m1", keep=(0,))
    request = request.model_copy(update={"evict": [request.evict[0].model_copy(update=evict_more)]})
    assert book.replace(state, request, now_ns=3).machines
    return state


NEW_LIST = [machine(0), machine(2), machine(3)]


def poll_without_m1(state: PoolState, at_h: float, *, over: bool = True, run: str = "1", silent: bool = True) -> None:
    now_ns = int(at_h * HOUR)
    looked = PollAnswers(
        machines=NEW_LIST,
        standbys=1,
        over=["gpt"] if over else [],
        jobs=[] if over else [running("gpt", 0, 2, run=run)],
        faults={"m1": "it does not answer"} if silent else {},
    )
    poll.apply(state, looked, began_ns=now_ns, now_ns=now_ns)


def test_a_machine_that_died_and_left_the_list_is_forgotten_once_its_evictions_do_not_count() -> None:
    state = dead()
    poll_without_m1(state, 1)
    poll_without_m1(state, 24.9)
    assert places(state)["m1"] == "quarantined gpt"
    poll_without_m1(state, 25)
    assert "m1" not in state.machines
    poll.apply(state, PollAnswers(machines=[*NEW_LIST, machine(1)], standbys=1), began_ns=26 * HOUR, now_ns=26 * HOUR)
    assert places(state)["m1"] == "provisioning", "m1 was forgotten, so it counts as new"


def test_a_machine_in_the_list_is_not_forgotten_nor_is_one_that_came_back_into_it() -> None:
    state = dead()
    poll_without_m1(state, 1)
    faults = {"m1": "it does not answer"}
    listed = PollAnswers(machines=[*NEW_LIST, machine(1)], standbys=1, over=["gpt"], faults=faults)
    poll.apply(state, listed, began_ns=20 * HOUR, now_ns=20 * HOUR)
    poll_without_m1(state, 26)
    poll_without_m1(state, 49)
    poll.apply(state, PollAnswers(over=["gpt"], faults=faults), began_ns=49 * HOUR, now_ns=49 * HOUR)
    assert places(state)["m1"] == "quarantined gpt"
    poll_without_m1(state, 50)
    assert "m1" not in state.machines


def test_a_machine_that_may_have_ranks_is_not_forgotten_while_their_job_runs() -> None:
    state = dead()
    poll_without_m1(state, 1, over=False)
    poll_without_m1(state, 50, over=False)
    assert places(state)["m1"] == "quarantined gpt"
    poll_without_m1(state, 51, over=False, run="2")
    assert "m1" not in state.machines


def test_a_machine_that_waits_for_an_operator_is_not_forgotten() -> None:
    state = dead(rule="failed-test")
    poll_without_m1(state, 1)
    poll_without_m1(state, 50)
    assert places(state)["m1"] == "quarantined gpt"


def test_a_release_forgets_a_machine_that_died_and_left_the_list() -> None:
    move = OperatorMove(machine="m1", operator="ada")
    state = dead()
    poll.apply(state, PollAnswers(faults={"m1": "it does not answer"}), began_ns=4, now_ns=5)
    assert "does not answer: release it once it answers" in book.operator_releases(state, move, now_ns=6)
    poll_without_m1(state, 1, over=False)
    said = book.operator_releases(state, move, now_ns=2 * HOUR)
    assert said == "m1 does not answer and left the list of the cluster: it is forgotten"
    assert "m1" not in state.machines
