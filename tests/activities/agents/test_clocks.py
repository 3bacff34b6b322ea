"""Times from a machine with a wrong clock are corrected. So the first failure and its age are known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.agents.confirm_steps import fit_milestones, states_of
from activities.agents.evidence import evidence_of
from activities.agents.stop_ranks import fit_stop
from activities.watching.job_view import JobView
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.first_failure import first_failure
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

S = 10**9
NOW = 10**6 * S
OFF = st.one_of(st.just(0), st.integers(-(10**5), 10**5).filter(lambda off: abs(off) > 12))
"""The error of a clock, seconds: either none, or an error that is large enough to be corrected.

A smaller error is not corrected. It could change the order of ends that are only seconds apart.
"""


def crashed(rank: int, at_ns: int) -> pb.RankEnd:
    return pb.RankEnd(rank=rank, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=at_ns), completed_steps=5)


@given(off_s=st.tuples(OFF, OFF, OFF))
def test_the_first_end_is_found_whatever_the_clocks_say(off_s: tuple[int, int, int]) -> None:
    replies = {}
    for rank, off in enumerate(off_s):
        # Rank 1 crashed first. All machines were asked at NOW, and answered 2 s later.
        end = crashed(rank, NOW - (8 if rank == 1 else 5) * S + off * S)
        replies[f"m{rank}"] = reply = pb.StopReply(ranks=[end], now_ns=NOW + 2 * S + off * S)
        fit_stop(reply, asked_ns=NOW, heard_ns=NOW + 2 * S + 10**6)
    found = first_failure(evidence_of(1, replies, []).exits)
    assert found is not None and found.rank == 1


@given(off_s=st.tuples(OFF, OFF, OFF))
def test_a_watcher_finds_it_too(off_s: tuple[int, int, int]) -> None:
    job = watched(3)
    for rank, off in enumerate(off_s):
        job.showed(f"m{rank}", shows(rank, NOW + off * S, 5), NOW)
    for rank, off in enumerate(off_s):
        at_ns = NOW - (4 if rank == 1 else 1) * S + off * S
        told = pb.RankEnd(rank=rank, exit=crashed(rank, at_ns).exit)
        job.ended(f"m{rank}", pb.Observation(id=f"m{rank}-1", sequence=1, generation=1, rank_ended=told), NOW)
    [found] = [one for one in job.verdicts(NOW) if isinstance(one, Anomaly)]
    assert found.ranks == [1]
    assert found.seen_ns == NOW - 4 * S


@given(off_s=OFF)
def test_milestones_are_told_by_one_clock(off_s: int) -> None:
    """All milestones are converted to the time of the worker's clock."""
    reply = shows(0, NOW + off_s * S, 5)
    reply.ranks[0].milestones.forked = NOW + off_s * S - 3 * S
    fit_milestones(reply, heard_ns=NOW)
    [state] = states_of(reply.ranks, 1)
    assert (state.forked_ns, state.joined_ns) == (NOW - 3 * S, 0)


@pytest.mark.parametrize("off_s", [-86_400, 0, 86_400])
@pytest.mark.parametrize("says_age", [True, False])
def test_saves_that_stop_are_noticed_in_the_same_moment(off_s: int, says_age: bool) -> None:
    seconds = noticed(lambda second: off_s, says_age=says_age)
    assert seconds == 26, "the last save was at second 20, and is more than 5 s old at second 26"


@pytest.mark.parametrize("off_s", [-86_400, 86_400])
def test_a_clock_that_is_set_meanwhile_hides_nothing(off_s: int) -> None:
    assert noticed(lambda second: off_s if second > 22 else 0, says_age=True) == 26


def noticed(off_s: Any, *, says_age: bool) -> int | None:
    """Return the second in which a watcher notices that nothing was saved since second 20. A step takes 0.1 s."""
    job = watched(1)
    for second in range(1, 60):
        reply = shows(0, NOW + (second + off_s(second)) * S, 10 * second)
        reply.ranks[0].milestones.first_step = NOW + (1 + off_s(1)) * S
        saved = min(second, 20)
        reply.ranks[0].saved.own_step = 10 * saved
        reply.ranks[0].saved.own_ns = NOW + (saved + off_s(saved)) * S
        reply.ranks[0].saved.own_age_s = max(second - saved, 0.001) if says_age else 0.0
        job.showed("m0", reply, NOW + second * S)
        if list(job.verdicts(NOW + second * S)):
            return second
    return None


def watched(machines: int) -> JobView:
    policy = CheckpointPolicy(max_unsaved_steps=10, max_unsaved_s=5.0)
    spec = JobSpec(name="job", script="/job.py", machines=machines, checkpoint=policy)
    return JobView(spec, [Machine(name=f"m{index}", address=f"h{index}:1") for index in range(machines)])


def shows(rank: int, now_ns: int, steps: int) -> pb.ProgressReply:
    saved = pb.SavedState(own_step=-1, backup_step=-1, disk_step=-1, disk_wanted=-1, remote_step=-1)
    one = pb.RankProgress(rank=rank, generation=1, alive=True, attached=True, completed_steps=steps, saved=saved)
    return pb.ProgressReply(time_ns=now_ns, generation=1, ranks=[one])
