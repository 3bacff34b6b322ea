"""The control plane's computations take time in proportion to the number of machines, up to 4,000 with 8 ranks each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import isqrt

import pytest

from activities.agents.confirm_steps import states_of
from activities.agents.convert import backup_peers, checkpoint_options, rank_launches, shared_environment
from activities.agents.evidence import evidence_of
from activities.watching.job_view import JobView
from agent.v1 import agent_pb2 as pb
from everstep.decisions.act.evict.plan_evictions import EvictFacts, plan_evictions
from everstep.decisions.act.evict.shared import alike_machines, kept_findings
from everstep.decisions.act.recover.confirm import judge_confirmation
from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.plan import plan_restart
from everstep.decisions.act.recover.rules import RestartFacts, decide
from everstep.decisions.blame.replay.group_jobs import plan_of
from everstep.decisions.blame.replay.groups import plan_replay
from everstep.decisions.keep.choose_restore import readers
from everstep.decisions.keep.placement import place_backups
from everstep.decisions.keep.search import merged
from everstep.decisions.pool import book, poll
from everstep.model.eviction import Eviction
from everstep.model.evidence import Evidence
from everstep.model.finding import Finding, MachineFinding
from everstep.model.incident import Anomaly, Symptom
from everstep.model.launch import Showing
from everstep.model.machine import Assignment, Machine
from everstep.model.places import Places
from everstep.model.pool import LeaseRequest, PollAnswers, PoolState, ReplaceRequest, RunningJob
from everstep.model.ranks import Ranks
from everstep.model.state_copy import StateCopies, Tier
from tests.sized import (
    MOST,
    NOW_NS,
    RANKS,
    growth,
    job,
    machines_of,
    observation,
    progress_reply,
    stop_replies,
)

Call = Callable[[], object]


def assigned(machines: int) -> Assignment[str]:
    return job(machines).assignment([machine.name for machine in machines_of(machines)])


@cache
def evidence(machines: int, *, raised: bool = False) -> Evidence:
    return evidence_of(3, stop_replies(machines, raised=raised), [], assigned(machines))


def case(machines: int) -> IncidentState:
    return IncidentState(
        spec=job(machines),
        machines=machines_of(machines),
        anomaly=Anomaly(id="m0-1", generation=3, symptom=Symptom.CRASH, headline="it broke"),
        generation=3,
        resume_step=0,
        lineage=[(3, 0)],
        run="a1b2c3d4e5f6",
        number=1,
    )


def watched(machines: int, code: int | None = None) -> JobView:
    """Return the view of a job that steps. With ``code``, every rank has ended with this exit code."""
    found = JobView(job(machines), machines_of(machines))
    for index, machine in enumerate(machines_of(machines)):
        found.showed(machine.name, progress_reply(index), NOW_NS)
    for rank in range(RANKS * machines if code is not None else 0):
        found.ended(f"machine-{rank // RANKS:04d}", observation(rank, code=code or 0), NOW_NS)
    return found


def emptied(machines: int) -> JobView:
    found = watched(machines)
    for machine in machines_of(machines):
        found.showed(machine.name, pb.ProgressReply(), NOW_NS)
    return found


def evidence_is_made(machines: int) -> Call:
    replies = stop_replies(machines, raised=True)
    return lambda: evidence_of(3, replies, [], assigned(machines))


def a_restore_is_chosen(machines: int) -> Call:
    found = evidence(machines)
    return lambda: case(machines).choose(found)


def a_restore_from_disk_is_given_readers(machines: int) -> Call:
    everywhere = str(Ranks.of(range(RANKS * machines)))
    copies = StateCopies(
        places=Places({"m0": everywhere}), completed_steps=100, tier=Tier.REMOTE, alike=Ranks.parse(everywhere)
    )
    return lambda: readers([copies], job(machines).topology())


def all_ranks_found_their_slots_damaged(machines: int) -> Call:
    found = evidence(machines, raised=True)
    exits = [end.model_copy(update={"exception": "CorruptCheckpoint: checksum"}) for end in found.exits]
    found = found.model_copy(update={"exits": exits})

    def call() -> None:
        one = case(machines)
        one.resume_step, one.lineage = 100, [(3, 100)]
        one.merge_evidence(one.merge_evidence(found))

    return call


def further_copies_are_found(machines: int) -> Call:
    found = evidence(machines)
    return lambda: merged(found, found)


def all_ranks_raised_and_it_is_decided(machines: int) -> Call:
    found, one = evidence(machines, raised=True), case(machines)
    size, policy = RANKS * machines, job(machines).policy
    return lambda: decide(
        RestartFacts(one.read_failure(found, now_ns=1, first=True), (), 0, found, restore_step=100, world_size=size),
        policy,
    )


def all_machines_came_back_empty(machines: int) -> Call:
    one = case(machines)
    found = one.merge_evidence(Evidence(generation=3, emptied=[machine.name for machine in machines_of(machines)]))
    return lambda: one.explain(found)


def backups_are_placed(machines: int) -> Call:
    return lambda: place_backups(job(machines).topology(), [machine.domain for machine in machines_of(machines)])


def backups_are_placed_where_all_machines_share_a_group(machines: int) -> Call:
    return lambda: place_backups(job(machines, pp=1).topology(), [machine.domain for machine in machines_of(machines)])


def launch_requests_are_made(machines: int) -> Call:
    spec = job(machines)
    assignment = spec.assignment(machines_of(machines))
    placement = place_backups(spec.topology())
    return lambda: [
        (
            rank_launches(spec, index),
            backup_peers(assignment, placement, index),
            shared_environment(spec, "h", 1, 1),
            checkpoint_options(spec),
        )
        for index in range(machines)
    ]


def a_restart_is_confirmed(machines: int) -> Call:
    spec, replies = job(machines), [progress_reply(index) for index in range(machines)]
    return lambda: judge_confirmation(
        3,
        [state for reply in replies for state in states_of(reply.ranks, 3)],
        world_size=RANKS * machines,
        showing=Showing(kind="steps", silent=Ranks.of(range(0, RANKS * machines, 2))),
        now_ns=NOW_NS,
        policy=spec.policy,
    )


def a_pool_of(machines: int) -> tuple[PoolState, list[Machine], PollAnswers]:
    """Return a pool in which a job has 15 of 16 machines, these machines, and the answers to a poll."""
    state, all_machines = PoolState(), machines_of(machines)
    answers = PollAnswers(machines=all_machines, standbys=machines // 16)
    poll.apply(state, answers, began_ns=1, now_ns=2)
    ours = all_machines[: machines - machines // 16]
    book.lease(state, LeaseRequest(job="large", run="r", machines=ours), now_ns=3)
    return state, ours, answers


def machines_are_polled(machines: int) -> Call:
    state, ours, answers = a_pool_of(machines)
    job = RunningJob(job="large", run="r", machines=ours, settled=True)
    later = answers.model_copy(update={"jobs": [job]})
    return lambda: poll.apply(state, later, began_ns=NOW_NS, now_ns=NOW_NS)


def machines_of_a_job_that_is_over_are_freed(machines: int) -> Call:
    state, _, answers = a_pool_of(machines)
    over = answers.model_copy(update={"over": ["large"]})
    return lambda: poll.apply(state.model_copy(deep=True), over, began_ns=NOW_NS, now_ns=NOW_NS)


def a_sixteenth_of_the_machines_is_replaced(machines: int) -> Call:
    state, ours, _ = a_pool_of(machines)
    lost = [
        Eviction(machine=one.name, rule="gone-machine", reason="silent", why="")
        for one in ours[:: len(ours) // (machines // 16)]
    ]
    request = ReplaceRequest(id="1", job="large", run="r", evict=lost, keep=ours)
    return lambda: book.choose(state.machines.values(), request)


def a_replay_is_planned(machines: int) -> Call:
    return lambda: plan_of(job(machines))


def a_replay_with_lent_machines_is_planned(machines: int) -> Call:
    return lambda: plan_replay(machines - 1, isqrt(machines))


def most_machines_have_a_fault(machines: int) -> Call:
    finding = Finding(inspection="kernel-log", reason="gpu-lost", item="GPU 3", text="Xid 79", sure=True)
    found = [MachineFinding(machine=one.name, finding=finding) for one in machines_of(machines)[: machines // 3]]
    names = [one.name for one in machines_of(machines)]

    def call() -> None:
        alike = alike_machines(found)
        kept = kept_findings(found, alike, machines)
        plan_evictions(EvictFacts(now_ns=1, machines=names, findings=kept, alike=alike), job(machines).policy)

    return call


def a_restart_is_planned(machines: int) -> Call:
    found = Evidence.model_validate_json(evidence(machines).model_dump_json())

    def call() -> None:
        one = case(machines)
        read = one.merge_evidence(found.model_copy())
        one.explain(read)
        one.record_failure(one.read_failure(read, now_ns=1, first=True))
        plan_restart(read, one)

    return call


def every_machine_shows_progress(machines: int) -> Call:
    return lambda: watched(machines)


def a_quiet_job_is_judged(machines: int) -> Call:
    found = watched(machines)
    return lambda: (list(found.verdicts(NOW_NS)), found.persist(NOW_NS), found.on_disks(), found.align(NOW_NS))


def every_rank_raised_and_it_is_judged(machines: int) -> Call:
    found = watched(machines, code=1)
    return lambda: list(found.verdicts(NOW_NS))


def every_rank_is_done_and_it_is_judged(machines: int) -> Call:
    found = watched(machines, code=0)
    return lambda: list(found.verdicts(NOW_NS))


def every_machine_was_emptied_and_it_is_judged(machines: int) -> Call:
    found = emptied(machines)
    return lambda: list(found.verdicts(NOW_NS))


@pytest.mark.parametrize(
    "prepare",
    [
        evidence_is_made,
        a_restore_is_chosen,
        a_restore_from_disk_is_given_readers,
        all_ranks_found_their_slots_damaged,
        further_copies_are_found,
        all_ranks_raised_and_it_is_decided,
        all_machines_came_back_empty,
        backups_are_placed,
        backups_are_placed_where_all_machines_share_a_group,
        launch_requests_are_made,
        a_restart_is_confirmed,
        machines_are_polled,
        machines_of_a_job_that_is_over_are_freed,
        a_sixteenth_of_the_machines_is_replaced,
        a_replay_is_planned,
        a_replay_with_lent_machines_is_planned,
        most_machines_have_a_fault,
        a_restart_is_planned,
        every_machine_shows_progress,
        a_quiet_job_is_judged,
        every_rank_raised_and_it_is_judged,
        every_rank_is_done_and_it_is_judged,
        every_machine_was_emptied_and_it_is_judged,
    ],
    ids=lambda prepare: prepare.__name__,
)
def test_four_times_the_machines_cost_far_less_than_sixteen_times_the_time(prepare: Callable[[int], Call]) -> None:
    ratio = growth(prepare)
    assert ratio < MOST, f"{ratio:.1f} times the CPU for 4 times the machines"
