"""The book of leases, case by case: which job has which machine. test_book_laws.py has the laws."""

from __future__ import annotations

from typing import Any

from everstep.decisions.pool import book, poll
from everstep.model.eviction import Eviction
from everstep.model.machine import Machine
from everstep.model.pool import (
    GiveBack,
    LeaseRequest,
    OperatorMove,
    PollAnswers,
    PoolPlace,
    PoolState,
    ReplaceRequest,
    RunningJob,
)

S = 10**9
HOUR = 3600 * S


def machine(number: int, domain: str = "") -> Machine:
    return Machine(name=f"m{number}", address=f"10.0.0.{number}:1", domain=domain)


def pool(count: int, standbys: int = 0, domains: list[str] | None = None) -> PoolState:
    """Return a pool of ``count`` machines after its first poll."""
    state = PoolState()
    machines = [machine(number, (domains or [""] * count)[number]) for number in range(count)]
    poll.apply(state, PollAnswers(machines=machines, standbys=standbys), began_ns=0, now_ns=1)
    assert state.known
    return state


def want(job: str, *numbers: int, run: str = "1") -> LeaseRequest:
    return LeaseRequest(job=job, run=run, machines=[machine(number) for number in numbers])


def running(job: str, *numbers: int, run: str = "1", settled: bool = True) -> RunningJob:
    return RunningJob(job=job, run=run, machines=[machine(number) for number in numbers], settled=settled)


def evict(
    name: str, job: str = "gpt", *, id: str = "i/1", keep: tuple[int, ...] = (), run: str = "1"
) -> ReplaceRequest:
    return ReplaceRequest(
        id=id,
        job=job,
        run=run,
        evict=[Eviction(machine=name, rule="sure-machine", reason="xid-79", why="GPU 3 fell off the bus")],
        keep=[machine(number) for number in keep],
    )


def places(state: PoolState) -> dict[str, str]:
    return {name: f"{one.place} {one.job}".strip() for name, one in state.machines.items()}


def test_the_last_of_the_list_are_standbys() -> None:
    assert places(pool(3, standbys=1)) == {"m0": "free", "m1": "free", "m2": "standby"}


def test_a_growing_list_has_as_many_standbys_as_it_asks_for() -> None:
    state = pool(3, standbys=1)
    longer = PollAnswers(machines=[machine(number) for number in range(5)], standbys=1)
    poll.apply(state, longer, began_ns=2, now_ns=3)
    assert places(state)["m3"] == places(state)["m4"] == "provisioning", "no poll has asked the new machines yet"
    poll.apply(state, longer, began_ns=4, now_ns=5)
    assert places(state) == {"m0": "free", "m1": "free", "m2": "free", "m3": "free", "m4": "standby"}


def test_no_job_gets_a_faulty_machine_until_a_poll_finds_no_fault() -> None:
    state = pool(3)
    poll.apply(state, PollAnswers(faults={"m1": "gpu-lost: GPU 3: lost"}), began_ns=2, now_ns=3)
    refused = book.lease(state, want("gpt", 0, 1), now_ns=4)
    assert (refused.refused, refused.may_change) == ({"m1": "it is faulty: gpu-lost: GPU 3: lost"}, True)
    assert places(state)["m0"] == "free", "a job gets all requested machines or none"
    poll.apply(state, PollAnswers(), began_ns=5, now_ns=6)
    assert not book.lease(state, want("gpt", 0, 1), now_ns=7).refused


def test_a_job_keeps_a_machine_on_which_a_fault_is_known() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    state.machines["m1"] = state.machines["m1"].model_copy(update={"fault": "gpu-lost"})
    assert not book.lease(state, want("gpt", 0, 1), now_ns=3).refused, (
        "the job's own rules decide about the faulty machine"
    )


def test_only_one_job_gets_a_machine() -> None:
    state = pool(3)
    assert not book.lease(state, want("gpt", 0, 1), now_ns=2).refused
    refused = book.lease(state, want("bert", 1, 2), now_ns=3)
    assert refused.refused == {"m1": "job gpt has it"}
    assert refused.may_change
    assert places(state)["m2"] == "free", "a refused request leases none of its machines"
    assert not book.lease(state, want("gpt", 0, 1), now_ns=4).refused, "a repeated request gets the same lease"
    assert state.machines["m0"].since_ns == 2


def test_an_evicted_machine_is_replaced_by_a_standby_of_another_domain() -> None:
    state = pool(5, standbys=2, domains=["a", "a", "b", "a", "b"])
    book.lease(state, LeaseRequest(job="gpt", run="1", machines=[machine(0, "a"), machine(1, "a")]), now_ns=2)
    answer = book.replace(state, evict("m1", keep=(0,)), now_ns=3)
    assert answer.machines == {"m1": machine(4, "b")}
    assert places(state) == {
        "m0": "active gpt",
        "m1": "quarantined gpt",
        "m2": "free",
        "m3": "standby",
        "m4": "active gpt",
    }
    assert book.replace(state, evict("m1", keep=(0,)), now_ns=9) == answer, (
        "a repeated request gets the same replacement"
    )
    assert state.machines["m1"].uncleaned


def test_a_machine_that_left_with_ranks_is_polled_often_for_a_while() -> None:
    """The machine may answer again soon."""
    state = pool(5, 2)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    assert not poll.is_to_be_cleaned(state, now_ns=2)
    book.replace(state, evict("m1", keep=(0,)), now_ns=3)
    late = int(poll.CLEANED_S * S) + 3
    assert [poll.is_to_be_cleaned(state, now_ns=at) for at in (3, late - 1, late)] == [True, True, False]
    poll.apply(state, PollAnswers(cleaned=["m1"]), began_ns=4, now_ns=5)
    assert not poll.is_to_be_cleaned(state, now_ns=5)


def test_without_enough_machines_none_is_evicted_until_a_later_request() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    answer = book.replace(state, evict("m1", keep=(0,)), now_ns=3)
    assert not answer.machines
    assert "1 needed and 0 to spare" in answer.why
    assert places(state)["m1"] == "active gpt"
    for began_ns in (4, 6):
        poll.apply(
            state, PollAnswers(machines=[machine(0), machine(1), machine(2)]), began_ns=began_ns, now_ns=began_ns + 1
        )
    assert book.replace(state, evict("m1", keep=(0,)), now_ns=8).machines["m1"].name == "m2"


def test_an_unfit_machine_is_no_replacement() -> None:
    state = pool(3, standbys=1)
    poll.apply(state, PollAnswers(faults={"m2": "it does not answer"}), began_ns=2, now_ns=3)
    book.lease(state, want("gpt", 0), now_ns=4)
    assert book.replace(state, evict("m0"), now_ns=5).machines["m0"].name == "m1"


def quarantine(state: PoolState) -> int:
    """Evict m0 from the job gpt, and return the time of the eviction."""
    book.lease(state, want("gpt", 0), now_ns=2)
    assert book.replace(state, evict("m0", id=f"i/{state.machines['m0'].evicted_ns}"), now_ns=HOUR).machines
    return HOUR


def test_a_machine_leaves_quarantine_only_after_it_passed_its_tests_and_is_clean() -> None:
    state = pool(2, standbys=1)
    now = quarantine(state)

    def looked(seconds: float, **found: Any) -> str:
        at = now + int(seconds * S)
        poll.apply(state, PollAnswers(**found), began_ns=at - S, now_ns=at, quarantine_s=100.0)
        return str(state.machines["m0"].place)

    assert looked(30, faults={"m0": "it does not answer"}) == "quarantined"
    assert [looked(seconds) for seconds in (60, 90, 120, 150)] == ["quarantined"] * 4, "ranks may still run there"
    assert looked(160, cleaned=["m0"], faults={"m0": "xid-79: lost"}) == "quarantined"
    assert [looked(seconds) for seconds in (170, 180)] == ["quarantined"] * 2
    assert looked(190) == "standby", "the pool lacks a standby"
    [returned] = poll.questions(state, PollAnswers()).returned
    assert (returned.machine, returned.job) == ("m0", "gpt")
    looked(200)
    assert poll.questions(state, PollAnswers()).returned == [returned], (
        "the ledger did not answer, so the return is written again"
    )
    looked(210, written=[returned])
    assert poll.questions(state, PollAnswers()).returned == []


def test_a_machine_that_was_evicted_twice_needs_an_operator() -> None:
    state = pool(3, standbys=2)
    now = quarantine(state)
    move = OperatorMove(machine="m0", operator="me")
    for seconds in (10, 20, 30):
        poll.apply(
            state,
            PollAnswers(cleaned=["m0"]),
            began_ns=now + seconds * S,
            now_ns=now + (seconds + 1) * S,
            quarantine_s=0.0,
        )
    assert state.machines["m0"].place is PoolPlace.STANDBY
    book.lease(state, want("gpt", 0), now_ns=2 * HOUR)
    assert book.replace(state, evict("m0", id="i/2"), now_ns=2 * HOUR + 1).machines
    for hours in (3, 4, 5, 6):
        poll.apply(state, PollAnswers(cleaned=["m0"]), began_ns=hours * HOUR, now_ns=hours * HOUR + 1, quarantine_s=0.0)
    assert str(state.machines["m0"].place) == "quarantined"
    assert book.operator_releases(state, move, now_ns=7 * HOUR).startswith("m0 is ")
    assert state.machines["m0"].place in {PoolPlace.STANDBY, PoolPlace.FREE}


def test_an_incomplete_poll_ends_no_lease() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0), now_ns=2)
    for hours in (1, 2, 3, 4):
        poll.apply(
            state, PollAnswers(unknown=["gpt"], problem="no answer"), began_ns=hours * HOUR, now_ns=hours * HOUR + 1
        )
    assert places(state)["m0"] == "active gpt"
    poll.apply(state, PollAnswers(over=["gpt"]), began_ns=5 * HOUR, now_ns=5 * HOUR + 1)
    assert places(state)["m0"] == "free"


def test_a_poll_does_not_end_a_newer_lease() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0), now_ns=20)
    poll.apply(state, PollAnswers(over=["gpt"]), began_ns=10, now_ns=30)
    assert places(state)["m0"] == "active gpt"


def test_a_machine_that_its_job_does_not_name_is_free_after_two_polls() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    jobs = [RunningJob(job="gpt", run="1", machines=[machine(0)], settled=True)]
    for hours, place in ((1, "active gpt"), (2, "free")):
        poll.apply(state, PollAnswers(jobs=jobs), began_ns=hours * HOUR, now_ns=hours * HOUR + 1)
        assert places(state) == {"m0": "active gpt", "m1": place}


def test_a_machine_that_an_incident_holds_stays_with_its_job_however_long_the_stop_takes() -> None:
    """Otherwise another job could get the machine while its ranks still run."""
    state = pool(3, standbys=1)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    assert book.replace(state, evict("m1", keep=(0,)), now_ns=3).machines["m1"].name == "m2"
    jobs = [RunningJob(job="gpt", run="1", machines=[machine(0), machine(1)])]
    for hours in (1, 2, 3, 4):
        poll.apply(state, PollAnswers(jobs=jobs), began_ns=hours * HOUR, now_ns=hours * HOUR + 1)
    assert places(state)["m2"] == "active gpt"
    assert book.lease(state, want("bert", 2), now_ns=5 * HOUR).refused


def test_a_job_that_is_older_than_the_pool_has_its_machines() -> None:
    state = PoolState()
    jobs = [RunningJob(job="gpt", run="1", machines=[machine(0), machine(7)])]
    poll.apply(state, PollAnswers(machines=[machine(0), machine(1)], jobs=jobs), began_ns=10, now_ns=11)
    assert places(state) == {"m0": "active gpt", "m1": "free", "m7": "active gpt"}


def test_no_job_gets_a_machine_before_the_pool_knows_where_jobs_run() -> None:
    state = PoolState()
    poll.apply(state, PollAnswers(listed=False), began_ns=1, now_ns=2)
    assert not state.known
    for number in range(poll.UNKNOWN_POLLS):
        assert not state.known
        poll.apply(state, PollAnswers(unknown=["old"]), began_ns=10 + number, now_ns=11 + number)
    assert state.known, "a job that never answers does not block all others"


def test_an_operator_takes_a_machine_out_of_use_and_back_in() -> None:
    state = pool(2)
    book.lease(state, want("gpt", 0), now_ns=2)
    move = OperatorMove(machine="m0", operator="me", reason="a loud fan")
    assert "leaves job gpt" in book.operator_evicts(state, move, now_ns=3)
    assert places(state)["m0"] == "active gpt"
    book.give_back(state, GiveBack(job="gpt", run="1"), now_ns=4)
    assert places(state)["m0"] == "cordoned"
    assert state.machines["m0"].why == "a loud fan"
    refused = book.lease(state, want("gpt", 0), now_ns=5)
    assert "a loud fan" in refused.refused["m0"]
    assert not refused.may_change
    assert book.operator_releases(state, move, now_ns=6) == "m0 is free"
    assert not book.operator_evicts(state, OperatorMove(machine="m9", operator="me"), now_ns=7)


def test_a_new_run_does_not_get_a_machine_that_an_operator_evicts() -> None:
    """The earlier run was terminated by hand, and no poll has seen that yet."""
    state = pool(3)
    book.lease(state, want("gpt", 0, 1), now_ns=2)
    book.operator_evicts(state, OperatorMove(machine="m1", operator="ada", reason="a loud fan"), now_ns=3)
    assert not book.lease(state, want("gpt", 0, 1), now_ns=4).refused, "the same run asks again"
    refused = book.lease(state, want("gpt", 0, 1, run="2"), now_ns=5).refused
    assert refused == {"m1": "evicted by ada: a loud fan; 'everstep release m1' lets jobs have it"}
    assert not book.lease(state, want("gpt", 0, 2, run="2"), now_ns=6).refused
    poll.apply(state, PollAnswers(jobs=[running("gpt", 0, 2, run="2")]), began_ns=7, now_ns=8)
    assert places(state) == {"m0": "active gpt", "m1": "cordoned", "m2": "active gpt"}
    assert state.machines["m1"].why == "a loud fan"


def test_jobs_that_can_release_a_machine_are_asked_first() -> None:
    state = pool(6)
    for number, job in enumerate("abc"):
        book.lease(state, want(job, number), now_ns=2)
        book.operator_evicts(state, OperatorMove(machine=f"m{number}", operator="ada"), now_ns=3)

    def told(**settled: bool) -> list[str]:
        jobs = [running(job, "abc".index(job), settled=one) for job, one in settled.items()]
        return [one.machine.name for one in poll.leaving(state, PollAnswers(jobs=jobs))]

    assert told(a=False, b=True, c=False) == ["m1"]
    assert told(b=True) == ["m1", "m0", "m2"], "the state of the others is unknown"
    book.lease(state, want("d", 3, 4), now_ns=4)
    assert state.spare == 1
    assert told(a=False, b=True, c=True) == ["m1"]
    assert told(c=True) == ["m2"]


def test_no_poll_clears_the_fault_that_a_test_found() -> None:
    """Inspections do not find wrong computations, so the machine waits for an operator."""
    state = pool(2, standbys=1)
    book.lease(state, want("gpt", 0), now_ns=1)
    asked = evict("m0")
    tested = asked.evict[0].model_copy(update={"rule": "failed-test", "reason": "other-bits"})
    assert book.replace(state, asked.model_copy(update={"evict": [tested]}), now_ns=HOUR).machines
    for hours in (2, 3, 4, 5, 6):
        poll.apply(state, PollAnswers(cleaned=["m0"]), began_ns=hours * HOUR, now_ns=hours * HOUR + 1, quarantine_s=0.0)
    assert str(state.machines["m0"].place) == "quarantined" and state.machines["m0"].passed > poll.PASSES
    book.operator_releases(state, OperatorMove(machine="m0", operator="me"), now_ns=7 * HOUR)
    assert state.machines["m0"].place in {PoolPlace.STANDBY, PoolPlace.FREE}
    assert not state.machines["m0"].until_released
