"""The simulation of a policy on recorded events."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.evict.simulate import RecordedEvent, Simulation, simulate
from everstep.model.eviction import EvictMode
from everstep.model.finding import Finding, Health, Owner
from everstep.model.recovery_policy import RecoveryPolicy

S = 10**9
BEGIN = 1_000_000 * S
HOUR = 3600


def lost(at_s: float) -> Finding:
    return Finding(inspection="gpu", reason="gpu-lost", sure=True, since_ns=round(BEGIN + at_s * S))


def flap(at_s: float) -> Finding:
    fields: dict[str, Any] = {"verdict": Health.UNKNOWN, "owner": Owner.NETWORK, "since_ns": round(BEGIN + at_s * S)}
    return Finding(inspection="link", reason="nic-flap", item="eth0", **fields)


def event(at_s: float, machine: str, **fields: Any) -> RecordedEvent:
    return RecordedEvent(machine=machine, time_ns=round(BEGIN + at_s * S), **fields)


def evictions(simulation: Simulation) -> list[tuple[float, str, str, str]]:
    """Return time in seconds, mode, machine and rule of each simulated eviction."""
    return [
        ((one.time_ns - BEGIN) / S, str(one.mode), one.eviction.machine, one.eviction.rule) for one in simulation.done
    ]


def run(*events: RecordedEvent, machines: int = 8, **policy: Any) -> Simulation:
    return simulate(events, RecoveryPolicy(**policy), machines=machines)


def test_evictions_with_their_times_and_their_cost() -> None:
    done = run(
        event(0, "m0", findings=[]),
        event(HOUR, "m1", finding=lost(HOUR)),
        event(2 * HOUR, "m1", finding=lost(HOUR)),
        event(3 * HOUR, "m1", finding=lost(HOUR), over=True),
        event(8 * HOUR, "m2", finding=lost(8 * HOUR)),
        event(10 * HOUR, "m0", findings=[]),
    )

    assert evictions(done) == [
        (HOUR, "act", "m1", "sure-machine-fault"),
        (8 * HOUR, "act", "m2", "sure-machine-fault"),
    ]
    assert done.machines_out == 2
    assert done.machine_hours_out == 2 + 2, "m1 is healthy after two hours, m2 not before the end"
    assert (done.hours, done.machine_hours) == (10, 80)


def test_a_machine_that_is_healthy_again_may_be_evicted_again() -> None:
    again = [event(at_s, "m1", findings=[lost(at_s)] if bad else []) for at_s, bad in ((0, 1), (60, 0), (120, 1))]

    done = run(*again)

    assert [at_s for at_s, *_ in evictions(done)] == [0, 120]
    assert done.machines_out == 1


def test_the_breaker_trips_once_and_asks_once() -> None:
    done = run(*(event(60 * number, f"m{number}", finding=lost(60 * number)) for number in range(4)))

    assert [(mode, machine) for _, mode, machine, _ in evictions(done)] == [
        ("act", "m0"),
        ("act", "m1"),
        ("approve", "m2"),
        ("approve", "m3"),
    ]
    assert [(one.time_ns - BEGIN) / S for one in done.tripped] == [120]
    assert done.machines_out == 2


def test_the_breaker_counts_no_eviction_before_its_window() -> None:
    days = [event(25 * HOUR * number, f"m{number}", finding=lost(25 * HOUR * number)) for number in range(4)]

    assert run(*days).tripped == []


def test_an_eviction_in_shadow_mode_is_noted_once_as_long_as_its_finding_is_active() -> None:
    active = [event(at_s, "m1", findings=[lost(0)]) for at_s in (0, 60, 120)]

    done = run(*active, event(180, "m1", findings=[]), event(240, "m1", findings=[lost(240)]), evict={"mode": "shadow"})

    assert evictions(done) == [(at_s, "shadow", "m1", "sure-machine-fault") for at_s in (0, 240)]
    assert (done.machines_out, done.machine_hours_out) == (0, 0)
    assert len(done.of(EvictMode.SHADOW)) == 2


def test_the_second_flap_within_five_minutes_evicts() -> None:
    def flaps(machine: str, *at_s: float) -> list[RecordedEvent]:
        began = [event(one, machine, finding=flap(one)) for one in at_s]
        return began + [event(one + 5, machine, finding=flap(one), over=True) for one in at_s]

    assert evictions(run(*flaps("m1", 0, 200))) == [(200, "act", "m1", "repeated-network-alert")]
    assert evictions(run(*flaps("m1", 0, 320))) == []


def test_silence_grows_until_a_line_ends_it() -> None:
    def silent(at_s: float, silent_s: float, **fields: Any) -> RecordedEvent:
        return event(at_s, "m1", silent_s=silent_s, **fields)

    assert evictions(run(silent(0, 1.0), event(4, "m0", findings=[]))) == [(4, "act", "m1", "gone-machine")]
    assert evictions(run(silent(0, 1.0), silent(0.5, 0), event(3, "m0", findings=[]))) == []
    assert evictions(run(silent(0, 1.0), event(0.5, "m1", findings=[]), event(3, "m0", findings=[]))) == []
    assert evictions(run(silent(0, 9.0, stepping=True))) == []


def test_a_line_of_an_agent_that_did_not_answer_changes_no_findings() -> None:
    done = run(event(0, "m1", findings=[lost(0)]), event(60, "m1", findings=[], problem="it does not answer"))

    assert done.done[0].back_ns is None


def test_lines_without_a_time_are_counted_and_left_out() -> None:
    done = run(RecordedEvent(machine="m1", findings=[lost(0)]), event(0, "m2", findings=[]))

    assert (done.events, done.without_time, done.done) == (1, 1, [])
    assert simulate([], RecoveryPolicy()).hours == 0


def test_the_policy_decides() -> None:
    bad = event(0, "m1", findings=[lost(0)])

    assert run(bad, evict={"mode": "off"}).done == []
    assert run(bad, evict={"rules": {"sure-machine-fault": "approve"}}).done[0].mode is EvictMode.APPROVE


def test_machines_that_were_asked_together_are_judged_together() -> None:
    """If they were judged one after the other, the first machines would be evicted for a shared fault."""
    round_of_answers = [event(number / 10, f"m{number}", findings=[lost(0)]) for number in range(6)]

    assert evictions(run(*round_of_answers)) == []


@settings(max_examples=25)
@given(
    st.dictionaries(st.integers(0, 500), st.tuples(st.sampled_from(["m0", "m1", "m2"]), st.booleans()), max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_order_of_lines_does_not_matter_and_an_evicted_machine_is_not_evicted_again(
    looks: dict[int, tuple[str, bool]], order: random.Random
) -> None:
    events = [event(at_s, machine, findings=[lost(0)] if bad else []) for at_s, (machine, bad) in looks.items()]
    done = run(*events)
    order.shuffle(events)

    assert run(*events) == done
    for machine in ("m0", "m1", "m2"):
        outs = [one for one in done.of(EvictMode.ACT) if one.eviction.machine == machine]
        assert all(one.back_ns and one.back_ns <= later.time_ns for one, later in pairwise(outs))
