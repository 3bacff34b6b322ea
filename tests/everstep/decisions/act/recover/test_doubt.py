"""A job never goes on from an older step than one that may exist where nobody could look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.recover.doubt import Doubt, Known, doubt_of
from everstep.decisions.act.recover.rules import Action, RestartFacts, decide
from everstep.decisions.keep.choose_restore import choose_restore, copy_of
from everstep.decisions.keep.search import merged, unanswered
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.incident import Failure, Symptom
from everstep.model.machine import Assignment
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopy, Tier
from everstep.model.topology import Topology
from everstep.slots.format import CUT_SHORT

MACHINES = ("m0", "m1", "m2", "m3")
RANKS = range(4)
ASSIGNMENT = Assignment(Topology.of(machines=4, ranks_per_machine=1), MACHINES)
SHARED = CheckpointPolicy(disk_path="/mnt/runs", disk_every_steps=10, disk_every_min=0)
REMOTE = CheckpointPolicy(remote_url="file:///mnt/runs")
SILENT = Unlisted(tier=Tier.DISK, machines=["m1"], reason="no answer for 5 s")


def copies(tier: Tier, steps: Any, ranks: Any = RANKS) -> list[StateCopy]:
    return [
        StateCopy(rank=rank, machine=f"m{rank}", completed_steps=step, tier=tier) for rank in ranks for step in steps
    ]


def known(held: list[StateCopy], policy: CheckpointPolicy = SHARED, **more: Any) -> Known:
    resume_step = more.pop("resume_step", -1)
    unreached = more.pop("unreached", [])
    return Known(held, unreached, Evidence(generation=1, **more), ASSIGNMENT, resume_step, policy)


ALL_OWN = copies(Tier.OWN, (24, 25))
M1_LOST = copies(Tier.OWN, (24, 25), (0, 2, 3))
OTHERS_HAVE_20 = [*M1_LOST, *copies(Tier.DISK, (20,), (0, 2, 3))]


@pytest.mark.parametrize(
    ("step", "facts"),
    [
        pytest.param(25, known(ALL_OWN, unlisted=[SILENT]), id="all own memory is there"),
        pytest.param(25, known(ALL_OWN, REMOTE), id="and remote storage need not be asked"),
        pytest.param(
            25,
            known([*ALL_OWN, *copies(Tier.OWN, (30,), (7,)), *copies(Tier.DISK, (30,), (9,))], unlisted=[SILENT]),
            id="copies of ranks that the job does not have, of a larger run of its name",
        ),
        pytest.param(
            24,
            known([one for one in ALL_OWN if (one.rank, one.completed_steps) != (2, 25)], unlisted=[SILENT]),
            id="a rank had not saved the newest yet",
        ),
        pytest.param(
            25,
            known([*M1_LOST, *copies(Tier.BACKUP, (25,), (1,))], emptied=["m1"]),
            id="the backup is as new as can be",
        ),
        pytest.param(
            24,
            known([*M1_LOST, *copies(Tier.BACKUP, (24,), (1,))], emptied=["m1"], disk_asked=0),
            id="the backup lags, and no disk was due between",
        ),
        pytest.param(
            20,
            known([*M1_LOST, *copies(Tier.DISK, (20,))], emptied=["m1"], searched=True),
            id="everything was asked",
        ),
        pytest.param(0, known(M1_LOST, searched=True, emptied=["m1"]), id="nothing is left, and all was asked"),
        pytest.param(
            0,
            known(M1_LOST, searched=True, emptied=["m1"], unlisted=[Unlisted(tier=Tier.DISK, machines=["m0"])]),
            id="the disk that is silent is not that of the rank whose state is gone",
        ),
        pytest.param(-1, known([], REMOTE, exits=[RankExit(rank=r, machine=f"m{r}") for r in RANKS]), id="no state"),
    ],
)
def test_a_step_is_certain(step: int, facts: Known) -> None:
    assert doubt_of(step, facts) is None


@pytest.mark.parametrize(
    ("step", "facts", "newest", "says"),
    [
        pytest.param(
            0,
            known(OTHERS_HAVE_20, emptied=["m1"]),
            20,
            "disk of m1 (not asked yet)",
            id="an empty machine's disk is to be asked",
        ),
        pytest.param(
            0,
            known(OTHERS_HAVE_20, emptied=["m1"], searched=True, unlisted=[SILENT]),
            20,
            "disk of m1 (no answer for 5 s)",
            id="it did not answer",
        ),
        pytest.param(
            24,
            known([*M1_LOST, *copies(Tier.BACKUP, (24,), (1,))], CheckpointPolicy(disk_path="/d"), emptied=["m1"]),
            25,
            "step 25 may exist",
            id="nobody can say which steps were asked for",
        ),
        pytest.param(
            0,
            known([], REMOTE, emptied=list(MACHINES)),
            None,
            "a newer step may exist: remote storage",
            id="all is lost",
        ),
        pytest.param(
            20,
            known(
                [*copies(Tier.OWN, (25,), (0, 2, 3)), *copies(Tier.DISK, (20,))],
                emptied=["m1"],
                searched=True,
                held_cut=True,
                unlisted=[SILENT],
                exits=[RankExit(rank=rank, machine=f"m{rank}", completed_steps=31) for rank in (0, 2, 3)],
            ),
            30,
            "step 30 may exist",
            id="not all that was told is kept",
        ),
    ],
)
def test_a_newer_step_may_exist(step: int, facts: Known, newest: int | None, says: str) -> None:
    found = doubt_of(step, facts)

    assert found is not None
    assert found.newest == newest
    assert says in found.text


def test_a_copy_that_could_not_be_brought_exists() -> None:
    stuck = StateCopy(rank=1, machine="m0", completed_steps=25, tier=Tier.BACKUP, valid=False, reason="no room on m1")
    found = doubt_of(20, known([*M1_LOST, stuck], unreached=[stuck], searched=True))

    assert found == Doubt(25, ("the backup of rank 1 on m0 could not be brought (no room on m1)",), False, False)


def test_a_slot_that_was_cut_short_was_never_copied_and_a_damaged_header_says_nothing() -> None:
    cut = StateCopy(rank=1, machine="m1", completed_steps=-1, valid=False, reason=CUT_SHORT)
    torn = cut.model_copy(update={"reason": "its header does not match its checksum"})
    held = [*copies(Tier.OWN, (29, 30), (0, 2, 3)), *copies(Tier.OWN, (29,), (1,))]
    exits = [RankExit(rank=1, machine="m1", completed_steps=30)]

    assert doubt_of(29, known([*held, cut], unlisted=[SILENT], exits=exits)) is None
    found = doubt_of(29, known([*held, torn], unlisted=[SILENT], exits=exits))
    assert found is not None and found.newest == 30


# What is done about it.

POLICY = RecoveryPolicy(storage={"tries": 3, "wait_initial_s": 5, "wait_factor": 4, "wait_max_s": 12})
ASKED = Doubt(120, ("disk of m1 (no answer for 5 s)",), False, True)


def doubting(doubt: Doubt | None = ASKED, **fields: Any) -> RestartFacts:
    """A job that failed first, and that could be tried again but for the doubt."""
    failure = Failure(generation=1, step=20, symptom=Symptom.CRASH, cause="SIGKILL")
    known: dict[str, Any] = {"evidence": Evidence(generation=1), "restore_step": 20, "world_size": 4, "doubt": doubt}
    return RestartFacts(failure, (), 0, **(known | fields))


def test_it_is_asked_at_once_then_ever_later_then_left_to_an_operator() -> None:
    verdicts = [decide(doubting(asked=asked), POLICY) for asked in range(4)]

    assert decide(doubting(replace(ASKED, to_ask=True)), POLICY).delay_s == 0
    assert [(one.action, one.rule, one.delay_s) for one in verdicts[1:]] == [
        (Action.SEARCH, "search-for-newer", 5),
        (Action.SEARCH, "search-for-newer", 12),
        (Action.PARK, "newer-may-exist", 0),
    ]
    assert verdicts[1].text == "step 120 may exist: disk of m1 (no answer for 5 s); asked again in 5 s"
    assert "certain is step 20" in verdicts[3].text
    assert decide(doubting(None, asked=9), POLICY).action is Action.REATTEMPT
    assert decide(doubting(accepted=True), POLICY).action is Action.REATTEMPT
    asked_first = doubting(replace(ASKED, to_ask=True), accepted=True)
    assert decide(asked_first, POLICY).action is Action.SEARCH, "it may be there"


# What is known after several looks.


def test_what_was_looked_at_once_is_known() -> None:
    stopped = Evidence(
        generation=1, emptied=["m3"], unlisted=[Unlisted(tier=Tier.DISK, machines=["m1"], reason="hangs")]
    )
    silent = Unlisted(tier=Tier.DISK, machines=["m0", "m1", "m3"], reason="no agent answers")
    remote = Unlisted(tier=Tier.REMOTE, reason="denied")

    first = merged(stopped, Evidence(generation=0, unlisted=[silent, remote]))
    assert first.searched
    assert first.unlisted == [silent.model_copy(update={"machines": ["m1", "m3"]}), remote]

    second = merged(first, Evidence(generation=0, unlisted=[silent.model_copy(update={"machines": ["m3"]})]))
    assert [one.machines for one in second.unlisted] == [["m3"]], "remote storage was listed"

    third = unanswered(second, MACHINES, "no worker")
    assert third.unlisted == [Unlisted(tier=Tier.DISK, machines=["m3"], reason="no worker")]
    assert [one.tier for one in unanswered(stopped, MACHINES, "no worker").unlisted] == [Tier.DISK, Tier.REMOTE]


# The law. What is drawn again and again is made once: to make a strategy takes longer than to draw from it.

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
def worlds(draw: st.DrawFn) -> tuple[CheckpointPolicy, list[StateCopy], Evidence, list[StateCopy], int]:
    """A job that was stopped: its policy, all copies that exist, what was told of them, what could not be brought.

    There is at least one step of which every rank has a copy somewhere, often the newest that there can be.
    """
    resume, policy = draw(RESUMES), draw(POLICIES)
    done = {rank: max(resume, 0) + draw(COMPLETED) for rank in RANKS}
    saved = {rank: max(done[rank] - draw(LAG), resume, 0) for rank in RANKS}
    whole = draw(st.integers(max(min(saved.values()) - 1, 0), min(saved.values())))
    named = draw(st.sampled_from([set(), {whole}, {whole, whole + 1}])) if policy.disk_every_min else set()

    def is_due(step: int) -> bool:
        every = policy.disk_every_steps
        return step <= resume or (policy.disk and (step in named or (every > 0 and step % every == 0)))

    emptied = draw(UP_TO_TWO)
    truth: list[StateCopy] = []
    for rank in RANKS:
        peer = f"m{(rank + 1) % 4}"
        if f"m{rank}" not in emptied:
            own = copies(Tier.OWN, {saved[rank], *([whole] if draw(EVEN) else [])} - {0}, (rank,))
            broken = draw(SELDOM)
            truth += [one.model_copy(update={"valid": not (broken and one.completed_steps == whole)}) for one in own]
        places = [Tier.BACKUP] if peer not in emptied else []
        places += [Tier.DISK, *([Tier.REMOTE] if policy.remote_url else [])] if is_due(whole) else []
        for tier in draw(st.sets(st.sampled_from(places), min_size=1)) if places and whole else ():
            machine = {Tier.BACKUP: peer, Tier.DISK: f"m{rank}", Tier.REMOTE: "m0"}[tier]
            truth.append(StateCopy(rank=rank, machine=machine, completed_steps=whole, tier=tier))
    dark, searched = draw(SOME_MACHINES), draw(EVEN)
    silent = dark | emptied if policy.disk_path and not searched else dark
    remote_dark = bool(policy.remote_url) and (not searched or draw(EVEN))
    told = [
        one
        for one in truth
        if not (one.tier is Tier.DISK and one.machine in silent) and not (one.tier is Tier.REMOTE and remote_dark)
    ]
    unlisted = [Unlisted(tier=Tier.DISK, machines=sorted(dark), reason="hangs")] if dark else []
    unlisted += [Unlisted(tier=Tier.REMOTE, reason="denied")] if remote_dark and searched else []
    stuck = draw(st.sets(st.integers(0, max(len(told) - 1, 0)), max_size=2)) if told else set()
    evidence = Evidence(
        generation=1,
        exits=[
            RankExit(rank=rank, machine=f"m{rank}", completed_steps=steps if steps > max(resume, 0) else -1)
            for rank, steps in done.items()
            if f"m{rank}" not in emptied
        ],
        held=told,
        emptied=sorted(emptied),
        unlisted=unlisted,
        searched=searched,
        disk_asked=draw(st.sampled_from([None, max(named, default=0)])),
    )
    unreached = [told[index].model_copy(update={"valid": False, "reason": "stuck"}) for index in sorted(stuck)]
    return policy, truth, evidence, unreached, resume


@settings(max_examples=500)
@given(worlds())
def test_nothing_newer_exists_than_what_is_certain(
    world: tuple[CheckpointPolicy, list[StateCopy], Evidence, list[StateCopy], int],
) -> None:
    policy, truth, evidence, unreached, resume = world
    stuck = {copy_of(one): one for one in unreached}
    held = [stuck.get(copy_of(one), one) for one in evidence.held]
    step = choose_restore(held, ASSIGNMENT, held_before=resume >= 0).step
    found = doubt_of(step, Known(held, unreached, evidence, ASSIGNMENT, resume, policy))

    existing = {one.completed_steps for one in truth}
    real = [
        there
        for there in existing
        if there > max(step, 0)
        and {one.rank for one in truth if one.valid and one.completed_steps == there} == set(RANKS)
    ]
    if real:
        assert found is not None, f"step {max(real)} exists"
        assert found.newest is None or found.newest >= max(real)
        assert found.places
    if found is None:
        return
    verdict = decide(doubting(found, asked=99, restore_step=step), RecoveryPolicy())
    assert verdict.action in {Action.SEARCH, Action.PARK}
    assert not found.to_ask or not evidence.searched, "what was asked is not asked anew as if it had not been"


@given(worlds())
def test_there_is_no_doubt_once_everything_was_asked_and_brought(
    world: tuple[CheckpointPolicy, list[StateCopy], Evidence, list[StateCopy], int],
) -> None:
    policy, truth, evidence, _, resume = world
    whole = evidence.model_copy(update={"held": truth, "unlisted": [], "searched": True})
    step = choose_restore(truth, ASSIGNMENT, held_before=resume >= 0).step

    assert doubt_of(step, Known(truth, [], whole, ASSIGNMENT, resume, policy)) is None
