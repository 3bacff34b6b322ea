"""A job never resumes from a step while a newer step may exist in a location that could not be listed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.recover.doubt import Doubt, DoubtFacts, doubt_of
from everstep.decisions.act.recover.rules import Action, RestartFacts, decide
from everstep.decisions.keep.choose_restore import choose_restore
from everstep.decisions.keep.lineage import usable
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.incident import Failure, Symptom
from everstep.model.machine import Assignment
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopies, Tier
from everstep.model.topology import Topology
from everstep.slots.format import CUT_SHORT

MACHINES = ("m0", "m1", "m2", "m3")
RANKS = range(4)
ASSIGNMENT = Assignment(Topology.of(machines=4, ranks_per_machine=1), MACHINES)
SHARED = CheckpointPolicy(disk_path="/mnt/runs", disk_every_steps=10, disk_every_min=0)
REMOTE = CheckpointPolicy(remote_url="file:///mnt/runs")
SILENT = Unlisted(tier=Tier.DISK, machines=["m1"], reason="no answer for 5 s")


def copies(tier: Tier, steps: Any, ranks: Any = RANKS) -> list[StateCopies]:
    return [
        StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=step, tier=tier)
        for rank in ranks
        for step in steps
    ]


def known(held: list[StateCopies], policy: CheckpointPolicy = SHARED, **more: Any) -> DoubtFacts:
    resume_step = more.pop("resume_step", -1)
    unreached = more.pop("unreached", [])
    return DoubtFacts(held, unreached, Evidence(generation=1, **more), ASSIGNMENT, resume_step, policy)


ALL_OWN = copies(Tier.OWN, (24, 25))
M1_LOST = copies(Tier.OWN, (24, 25), (0, 2, 3))
OTHERS_HAVE_20 = [*M1_LOST, *copies(Tier.DISK, (20,), (0, 2, 3))]


@pytest.mark.parametrize(
    ("step", "facts"),
    [
        pytest.param(25, known(ALL_OWN, unlisted=[SILENT]), id="all own slots are listed"),
        pytest.param(25, known(ALL_OWN, REMOTE), id="all own slots are listed, remote storage was not asked"),
        pytest.param(
            25,
            known([*ALL_OWN, *copies(Tier.OWN, (30,), (7,)), *copies(Tier.DISK, (30,), (9,))], unlisted=[SILENT]),
            id="copies of an earlier run of the job's name, which had more ranks",
        ),
        pytest.param(
            24,
            known([one for one in ALL_OWN if (one.ranks.first, one.completed_steps) != (2, 25)], unlisted=[SILENT]),
            id="a rank had not saved the newest step",
        ),
        pytest.param(
            25,
            known([*M1_LOST, *copies(Tier.BACKUP, (25,), (1,))], emptied=["m1"]),
            id="the backup has the newest step",
        ),
        pytest.param(
            24,
            known([*M1_LOST, *copies(Tier.BACKUP, (24,), (1,))], emptied=["m1"], disk_asked=0),
            id="the backup lags, and no later step was due on disk",
        ),
        pytest.param(
            20,
            known([*M1_LOST, *copies(Tier.DISK, (20,))], emptied=["m1"], searched=True),
            id="all locations were searched",
        ),
        pytest.param(0, known(M1_LOST, searched=True, emptied=["m1"]), id="no copy, all were searched"),
        pytest.param(
            0,
            known(M1_LOST, searched=True, emptied=["m1"], unlisted=[Unlisted(tier=Tier.DISK, machines=["m0"])]),
            id="the silent disk is not that of the rank without a copy",
        ),
        pytest.param(-1, known([], REMOTE, exits=[RankExit(rank=r, machine=f"m{r}") for r in RANKS]), id="no state"),
    ],
)
def test_a_step_is_certain(step: int, facts: DoubtFacts) -> None:
    assert doubt_of(step, facts) is None


@pytest.mark.parametrize(
    ("step", "facts", "newest", "text"),
    [
        pytest.param(
            0,
            known(OTHERS_HAVE_20, emptied=["m1"]),
            20,
            "disk of m1 (not asked yet)",
            id="the disk of an emptied machine has to be asked",
        ),
        pytest.param(
            0,
            known(OTHERS_HAVE_20, emptied=["m1"], searched=True, unlisted=[SILENT]),
            20,
            "disk of m1 (no answer for 5 s)",
            id="the disk of an emptied machine did not answer",
        ),
        pytest.param(
            24,
            known([*M1_LOST, *copies(Tier.BACKUP, (24,), (1,))], CheckpointPolicy(disk_path="/d"), emptied=["m1"]),
            25,
            "step 25 may exist",
            id="the steps that were requested are not known",
        ),
        pytest.param(
            0,
            known([], REMOTE, emptied=list(MACHINES)),
            None,
            "a newer step may exist: remote storage",
            id="all machines were emptied",
        ),
    ],
)
def test_a_newer_step_may_exist(step: int, facts: DoubtFacts, newest: int | None, text: str) -> None:
    doubt = doubt_of(step, facts)

    assert doubt is not None
    assert doubt.newest == newest
    assert text in doubt.text


def test_a_copy_that_is_out_of_reach_is_a_doubt() -> None:
    unreached = StateCopies.one(
        rank=1, machine="m0", completed_steps=25, tier=Tier.BACKUP, valid=False, reason="no room on m1"
    )
    doubt = doubt_of(20, known([*M1_LOST, unreached], unreached=[unreached], searched=True))

    assert doubt == Doubt(25, ("the backup of rank 1 on m0 is out of reach (no room on m1)",), False, False)


def test_a_slot_that_was_cut_short_was_never_copied_but_a_slot_with_a_damaged_header_may_have_been() -> None:
    cut = StateCopies.one(rank=1, machine="m1", completed_steps=-1, valid=False, reason=CUT_SHORT)
    torn = cut.model_copy(update={"reason": "its header does not match its checksum"})
    held = [*copies(Tier.OWN, (29, 30), (0, 2, 3)), *copies(Tier.OWN, (29,), (1,))]
    exits = [RankExit(rank=1, machine="m1", completed_steps=30)]

    assert doubt_of(29, known([*held, cut], unlisted=[SILENT], exits=exits)) is None
    found = doubt_of(29, known([*held, torn], unlisted=[SILENT], exits=exits))
    assert found is not None and found.newest == 30


# Tests of the decisions about a doubt.

POLICY = RecoveryPolicy(storage={"tries": 3, "wait_initial_s": 5, "wait_factor": 4, "wait_max_s": 12})
ASKED = Doubt(120, ("disk of m1 (no answer for 5 s)",), False, True)


def doubting(doubt: Doubt | None = ASKED, **fields: Any) -> RestartFacts:
    """Return the facts of a job's first failure, which leads to a reattempt unless there is a doubt."""
    failure = Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL")
    known: dict[str, Any] = {"evidence": Evidence(generation=1), "restore_step": 20, "world_size": 4, "doubt": doubt}
    return RestartFacts(failure, (), 0, **(known | fields))


def test_locations_are_asked_at_once_then_after_growing_delays_then_the_job_is_parked() -> None:
    verdicts = [decide(doubting(asked=asked), POLICY) for asked in range(4)]

    assert decide(doubting(replace(ASKED, to_ask=True)), POLICY).delay_s == 0
    assert [(one.action, one.rule, one.delay_s) for one in verdicts[1:]] == [
        (Action.SEARCH, "search-for-newer", 5),
        (Action.SEARCH, "search-for-newer", 12),
        (Action.PARK, "newer-may-exist", 0),
    ]
    assert verdicts[1].text == "step 120 may exist: disk of m1 (no answer for 5 s); asked again in 5 s"
    assert decide(doubting(None, asked=9), POLICY).action is Action.REATTEMPT
    assert decide(doubting(accepted=True), POLICY).action is Action.REATTEMPT
    not_asked = doubting(replace(ASKED, to_ask=True), accepted=True)
    assert decide(not_asked, POLICY).action is Action.SEARCH, "the location may have the newer step"


# The law. The strategies are made only once, because that takes longer than drawing from them.

RESUMES = st.sampled_from([-1, -1, 0, 8])
POLICIES = st.builds(
    CheckpointPolicy,
    disk=st.sampled_from([True, True, True, False]),
    disk_path=st.sampled_from(["", "/mnt/runs"]),
    disk_every_steps=st.sampled_from([0, 0, 3]),
    disk_every_min=st.sampled_from([0, 15, 15]),
    remote_url=st.sampled_from(["", "s3://runs"]),
)
COMPLETED, LAG = st.integers(0, 4), st.integers(0, 1)
SOME_MACHINES, UP_TO_TWO = st.sets(st.sampled_from(MACHINES)), st.sets(st.sampled_from(MACHINES), max_size=2)
SELDOM, EVEN = st.sampled_from([False, False, True]), st.booleans()


@st.composite
def worlds(draw: st.DrawFn) -> tuple[CheckpointPolicy, list[StateCopies], Evidence, list[StateCopies], int]:
    """Draw a stopped job: its policy, all copies that exist, the evidence, copies out of reach, and its resume step.

    There is at least one step of which every rank has a copy somewhere. Often it is the newest possible step.
    """
    resume, policy = draw(RESUMES), draw(POLICIES)
    done = {rank: max(resume, 0) + draw(COMPLETED) for rank in RANKS}
    saved = {rank: max(done[rank] - draw(LAG), resume, 0) for rank in RANKS}
    complete = draw(st.integers(max(min(saved.values()) - 1, 0), min(saved.values())))
    requested = draw(st.sampled_from([set(), {complete}, {complete, complete + 1}])) if policy.disk_every_min else set()

    def is_due(step: int) -> bool:
        every = policy.disk_every_steps
        return step <= resume or (policy.disk and (step in requested or (every > 0 and step % every == 0)))

    emptied = draw(UP_TO_TWO)
    truth: list[StateCopies] = []
    for rank in RANKS:
        peer = f"m{(rank + 1) % 4}"
        if f"m{rank}" not in emptied:
            own = copies(Tier.OWN, {saved[rank], *([complete] if draw(EVEN) else [])} - {0}, (rank,))
            broken = draw(SELDOM)
            truth += [one.model_copy(update={"valid": not (broken and one.completed_steps == complete)}) for one in own]
        tiers = [Tier.BACKUP] if peer not in emptied else []
        tiers += [Tier.DISK, *([Tier.REMOTE] if policy.remote_url else [])] if is_due(complete) else []
        for tier in draw(st.sets(st.sampled_from(tiers), min_size=1)) if tiers and complete else ():
            machine = {Tier.BACKUP: peer, Tier.DISK: f"m{rank}", Tier.REMOTE: "m0"}[tier]
            truth.append(StateCopies.one(rank=rank, machine=machine, completed_steps=complete, tier=tier))
    dark, searched = draw(SOME_MACHINES), draw(EVEN)
    silent = dark | emptied if policy.disk_path and not searched else dark
    remote_dark = bool(policy.remote_url) and (not searched or draw(EVEN))
    listed = [
        one
        for one in truth
        if not (one.tier is Tier.DISK and one.machine in silent) and not (one.tier is Tier.REMOTE and remote_dark)
    ]
    unlisted = [Unlisted(tier=Tier.DISK, machines=sorted(dark), reason="hangs")] if dark else []
    unlisted += [Unlisted(tier=Tier.REMOTE, reason="denied")] if remote_dark and searched else []
    stuck = draw(st.sets(st.integers(0, max(len(listed) - 1, 0)), max_size=2)) if listed else set()
    evidence = Evidence(
        generation=1,
        exits=[
            RankExit(rank=rank, machine=f"m{rank}", completed_steps=steps if steps > max(resume, 0) else -1)
            for rank, steps in done.items()
            if f"m{rank}" not in emptied
        ],
        held=listed,
        emptied=sorted(emptied),
        unlisted=unlisted,
        searched=searched,
        disk_asked=draw(st.sampled_from([None, max(requested, default=0)])),
    )
    unreached = [listed[index].model_copy(update={"valid": False, "reason": "stuck"}) for index in sorted(stuck)]
    return policy, truth, evidence, unreached, resume


@settings(max_examples=500)
@given(worlds())
def test_no_newer_step_exists_than_a_certain_step(
    world: tuple[CheckpointPolicy, list[StateCopies], Evidence, list[StateCopies], int],
) -> None:
    policy, truth, evidence, unreached, resume = world
    held = usable(evidence.held, [], unreached)
    step = choose_restore(held, ASSIGNMENT, held_before=resume >= 0).step
    found = doubt_of(step, DoubtFacts(held, unreached, evidence, ASSIGNMENT, resume, policy))

    existing = {one.completed_steps for one in truth}
    real = [
        there
        for there in existing
        if there > max(step, 0)
        and {one.ranks.first for one in truth if one.valid and one.completed_steps == there} == set(RANKS)
    ]
    if real:
        assert found is not None, f"step {max(real)} exists"
        assert found.newest is None or found.newest >= max(real)
        assert found.locations
    if found is None:
        return
    verdict = decide(doubting(found, asked=99, restore_step=step), RecoveryPolicy())
    assert verdict.action in {Action.SEARCH, Action.PARK}
    assert not found.to_ask or not evidence.searched, "after a search no location is left to ask"


@given(worlds())
def test_there_is_no_doubt_once_all_locations_are_listed_and_all_copies_are_in_reach(
    world: tuple[CheckpointPolicy, list[StateCopies], Evidence, list[StateCopies], int],
) -> None:
    policy, truth, evidence, _, resume = world
    complete = evidence.model_copy(update={"held": truth, "unlisted": [], "searched": True})
    step = choose_restore(truth, ASSIGNMENT, held_before=resume >= 0).step

    assert doubt_of(step, DoubtFacts(truth, [], complete, ASSIGNMENT, resume, policy)) is None
