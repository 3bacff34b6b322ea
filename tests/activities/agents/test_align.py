"""Alignment of ranks: all ranks end the same step and save it in their own memory and, if needed, in their backups."""

from __future__ import annotations

import pytest

from activities.agents import align_ranks
from activities.agents.align_ranks import AlignRanks, RanksAligned
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.recovery_policy import RecoveryPolicy
from tests.activities.performing import perform
from tests.activities.spoken import reached

STEP = 10


def shown(
    rank: int,
    completed: int,
    *,
    own: int,
    backup: int,
    alive: bool = True,
    none: bool = False,
    step_s: float = 0.0,
    waits: bool | None = None,
) -> pb.ProgressReply:
    saved = pb.SavedState(own_step=own, backup_step=backup, backup_none=none)
    return pb.ProgressReply(
        generation=1,
        ranks=[
            pb.RankProgress(
                rank=rank,
                generation=1,
                alive=alive,
                completed_steps=completed,
                aligned=completed if (completed >= STEP if waits is None else waits) else 0,
                saved=saved,
                metrics=pb.Metrics(step_s=step_s),
            )
        ],
    )


def machine(*replies: pb.ProgressReply) -> FakeAgent:
    """Return an agent that reports these states one after the other, and then reports nothing more."""

    return FakeAgent(align_ranks=pb.AlignRanksReply(known=True, farthest=STEP - 1), progress=[*replies, NEVER])


async def aligned(*agents: FakeAgent, backed_up: list[int], align_s: float = 10.0) -> RanksAligned:
    spec = JobSpec(
        name="gpt", script="/train.py", machines=len(agents), policy=RecoveryPolicy(stop={"align_s": align_s})
    )
    async with reached(agents) as (pool, machines):
        wait = AlignRanks(job=PlacedJob(spec=spec, machines=machines), generation=1, backed_up=backed_up)
        return await perform(wait, agents=pool)


STAYS = [shown(0, 9, own=9, backup=9), shown(0, 10, own=10, backup=8)]


@pytest.mark.parametrize(
    "leaves",
    [
        [shown(1, 10, own=10, backup=9), shown(1, 10, own=10, backup=10)],
        [shown(1, 10, own=10, backup=8, none=True)],
        [shown(1, 9, own=9, backup=9, alive=False)],
        [shown(1, 10, own=-1, backup=-1)],
    ],
    ids=["backed up late", "has no peer", "ended", "keeps nothing"],
)
async def test_of_ranks_that_leave_their_machine_the_backup_has_the_step(leaves: list[pb.ProgressReply]) -> None:
    assert await aligned(machine(*STAYS), machine(*leaves), backed_up=[1]) == RanksAligned(step=STEP)


async def test_a_backup_that_does_not_come_is_waited_for_no_longer_than_asked() -> None:
    behind = [shown(1, 10, own=10, backup=9)]
    found = await aligned(machine(*STAYS), machine(*behind), backed_up=[1], align_s=0.3)
    assert (found.step, found.why.startswith("rank 1 did not end step 10 and save it within 0.3 s")) == (-1, True)
    assert await aligned(machine(*STAYS), machine(*behind), backed_up=[]) == RanksAligned(step=STEP)


async def test_ranks_that_wait_for_others_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that get no request for a while continue, since the worker may be gone. So the request is repeated."""
    monkeypatch.setattr(align_ranks, "ASK_AGAIN_S", 0.01)
    asked: list[int] = []

    def answer(request: pb.AlignRanksRequest) -> pb.AlignRanksReply:
        asked.append(request.step)
        return pb.AlignRanksReply(known=True, farthest=STEP - 1)

    waits, behind = machine(*STAYS), machine(shown(1, 9, own=9, backup=9))
    waits.answer(align_ranks=answer)
    assert (await aligned(waits, behind, backed_up=[], align_s=1.0)).step == -1
    assert asked[0] == 0
    assert len(asked) > 5
    assert set(asked[1:]) == {STEP}


@pytest.mark.parametrize(("step_s", "gives_up"), [(0.05, True), (10.0, False), (0.0, False)])
async def test_an_alignment_is_given_up_when_no_rank_goes_on(
    step_s: float, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hangs makes all others wait. A step that is long, or whose duration is unknown, is waited for."""
    monkeypatch.setattr(align_ranks, "STILL_S", 0.5)
    hangs = [shown(1, 9, own=9, backup=9, step_s=step_s)]
    found = await aligned(machine(*STAYS), machine(*hangs), backed_up=[], align_s=4.0)
    assert found.step == -1
    assert ("no rank goes on" in found.why) == gives_up


async def test_a_backup_that_takes_many_steps_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align_ranks, "STILL_S", 0.2)
    saves = [shown(1, 10, own=10, backup=9, step_s=0.01)]
    found = await aligned(machine(*STAYS), machine(*saves), backed_up=[1], align_s=2.0)
    assert "within 2 s" in found.why


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        ([[(11, True)], [(11, False)]], 11),
        ([[(12, False)], [(11, False), (12, True)]], 12),
        ([[(12, False)], [(11, False)]], None),
        ([[(12, True)], [(11, False)]], None),
    ],
    ids=["the other is inside a step that cannot end", "ahead by one step", "nobody waits", "one is late"],
)
async def test_a_rank_that_completed_the_step_may_still_compute_the_next_one(
    ranks: list[list[tuple[int, bool]]], step: int | None
) -> None:
    """If the request comes late, ranks may already be past the step."""
    agents = [
        machine(*(shown(rank, at, own=at, backup=at, waits=waits) for at, waits in of_rank))
        for rank, of_rank in enumerate(ranks)
    ]
    found = await aligned(*agents, backed_up=[], align_s=10.0 if step else 0.5)
    assert found.step == (step or -1)
