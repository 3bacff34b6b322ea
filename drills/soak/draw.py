"""Drawing a plan: every kind of fault alone, and every two that can meet, before any comes again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from drills.checks import SIGNALS
from drills.soak.plan import Episode, How, Sizes, SoakPlan
from drills.spec.catalogue import (
    AWAY,
    CATALOGUE,
    CONTROL_FAULTS,
    FITS,
    HANGS,
    LOSSES,
    MACHINE_FAULTS,
    OWN_JOBS,
    RANK_FAULTS,
    THEN,
    WHERE,
    FaultKind,
    kind_of,
)
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names
from drills.spec.stages import MOMENTS, REPORT
from drills.spec.sure_faults import SURE
from everstep.decisions.blame.replay.groups import replica_machines
from everstep.errors import ConfigError
from everstep.model.topology import AXES, Topology

PLACES = 100
"""Two faults that strike at one place so often are taken to have no other."""
RIDES: tuple[dict[str, Any], ...] = (
    {"lazy": True, "then": "kill-rank"},
    {"lazy": True, "then": "kill-machine"},
    {"lazy": True, "then": "kill-forkserver"},
    {"lazy": True, "window": 2.0},
)
FAILS_AFTER = (0, 1, 2)
"""Steps after which a bad version fails: before the next gate."""
EXCEPTIONS = ("ValueError", "RuntimeError", "IndexError")
CODES = (0, 1, 3)
XIDS = (79, 48, 94, 13, 31, 45)
"""Of a machine that is broken, and those that programs cause too."""
HANG_S = (1.0, 2.0, 4.0)
"""For how long an agent hangs, seconds: for some steps, and not much longer than from a fault to the next gate."""
BY_THEMSELVES = ("spin", "deadlock", "skip-collective", "hang-dataloader", "wrong-order")
"""To all others these are like a rank that is stopped, which meets them in their place."""
OPENS = tuple(name for name in (*RANK_FAULTS, *LOSSES) if name not in (*OWN_JOBS, *BY_THEMSELVES))
"""Faults of the long job that open an incident within which another one can strike."""
AWAY_S = (6.0, 12.0)
"""For how long something is away, seconds."""
LINK_DOWN_S = (6.0, 30.0)
"""For how long a link is down, seconds: the job goes on by itself, or stands still for too long."""
MEET_AWAY = ("kill-rank", "kill-machine")
"""What strikes together with something that is away: without the network a rank, or a machine, is lost."""
BESIDE = (*OPENS, *MACHINE_FAULTS, "hang-peer")
"""Faults that can strike together with another one, or within its recovery: they wait for nothing but their step."""
OFTEN = 8
"""Every kind comes at least so often before all meetings begin again."""
EACH_STAGE = 3
"""What dies in a stage of the other's recovery comes so much more often than two faults of ranks: it has several
stages to die in."""
STANDBYS = 2
"""Machines that the pool has beside those of jobs: no more are lost for good at once ( ``SoakPlan.standbys``)."""
OTHER = 2
"""Machines of the second job ( ``SoakPlan.other``)."""
STAGES = ("stop", "decide", "reattempt", "confirm")
"""Stages of every incident."""
OF_AN_UPDATE = ("align", *STAGES)
"""Stages of an update."""
WITH_RESTORE = (*STAGES[:2], "restore", *STAGES[2:])
"""Stages of an incident where memory was lost."""
WITH_EVICTION = (STAGES[0], "evict", "prepare", *WITH_RESTORE[1:])
"""Stages of an incident where a machine is lost for good."""
OF_A_HANG = ("trace", *WITH_EVICTION)
"""Stages of an incident of a rank that hangs."""

Options = dict[str, Any]
Draw = Callable[[Random, Topology], Options]


def _rank(rng: Random, topology: Topology) -> Options:
    return {"ranks": [rng.randrange(topology.world_size)]}


def _ranks(rng: Random, topology: Topology) -> Options:
    return {"ranks": sorted(rng.sample(range(topology.world_size), min(rng.choice((1, 1, 2)), topology.world_size)))}


def _group(rng: Random, topology: Topology) -> Options:
    kind = rng.choice(AXES)
    return {"kind": kind, "index": rng.randrange(len(topology.groups(kind)))}


def _update(rng: Random, topology: Topology) -> Options:
    """As often urgent as lazy; a lazy one rides on something, or is forced."""
    return rng.choice(({}, {"during": "kill-workers"}, {"during": "kill-agent"}, *RIDES))


def _bad_version(rng: Random, topology: Topology) -> Options:
    return rng.choice(({"at_start": True}, {"changes_state": True}, *({"fails_after": steps} for steps in FAILS_AFTER)))


def _bits(rng: Random, topology: Topology) -> Options:
    """A machine that its tests find, after a NaN or after a check, or that the job alone shows."""
    can_replay = 2 * replica_machines(topology) <= topology.machines
    return rng.choice(({}, {"finite": True}, {"only_in_job": True} if can_replay else {}))


def _launch_or_then(rng: Random, topology: Topology) -> Options:
    """The plain one as often as the others together."""
    return rng.choice(({}, {}, {}, {"during": "launch"}, {"then": THEN[0]}, {"then": THEN[1]}))


DRAWS: dict[str, Draw] = {
    "rank": _rank,
    "ranks": _ranks,
    "machine": lambda rng, topology: {"machine": rng.choice(machine_names(topology.machines))},
    "group": _group,
    "signal": lambda rng, topology: {"signal": rng.choice(SIGNALS)},
    "code": lambda rng, topology: {"code": rng.choice(CODES)},
    "exception": lambda rng, topology: {"exception": rng.choice(EXCEPTIONS)},
    "gone": lambda rng, topology: {"gone": True} if rng.random() < 0.5 else {},
    "where": lambda rng, topology: {"where": rng.choice(WHERE)},
    "then": lambda rng, topology: {"then": rng.choice(("", *THEN))},
    "launch or then": _launch_or_then,
    "seconds": lambda rng, topology: {"seconds": rng.choice(HANG_S)},
    "away": lambda rng, topology: {"seconds": rng.choice(AWAY_S)},
    "link down": lambda rng, topology: {"seconds": rng.choice(LINK_DOWN_S)},
    "xid": lambda rng, topology: {"code": rng.choice(XIDS)},
    "reason": lambda rng, topology: {"reason": rng.choice(SURE)},
    "bits": _bits,
    "fits": lambda rng, topology: {"fits": rng.choice(FITS)},
    "update": _update,
    "bad version": _bad_version,
    "stage": lambda rng, topology: {},  # that of its episode
}
"""What a kind of fault can name in ``draws`` → how it is drawn."""


def soaked() -> list[FaultKind]:
    """The kinds that a soak draws."""
    return [kind for kind in CATALOGUE if not kind.not_soaked]


def left_out() -> dict[str, str]:
    """Kind → why no soak draws it."""
    return {kind.name: why for kind in CATALOGUE if (why := kind.not_soaked)}


def meetings() -> list[tuple[How, tuple[str, ...]]]:
    """How faults can come: each alone, and every two that can meet, at the same step or within a recovery."""
    names = [kind.name for kind in soaked()]
    alone: list[tuple[How, tuple[str, ...]]] = [("alone", (name,)) for name in names if name not in CONTROL_FAULTS]
    beside = [name for name in names if name in BESIDE]
    pairs = [(first, second) for place, first in enumerate(beside) for second in beside[place:]]
    together: list[tuple[How, tuple[str, ...]]] = [("together", pair) for pair in pairs]
    within: list[tuple[How, tuple[str, ...]]] = [
        ("within", (first, second))
        for first in names
        for second in names
        if (first in OPENS and second in (*BESIDE, *CONTROL_FAULTS)) or (first == "update" and second in CONTROL_FAULTS)
    ]
    away = [name for name in names if name in AWAY and name not in OWN_JOBS]
    together += [("together", (first, second)) for first in MEET_AWAY for second in away]
    return alone + together + within


def draw(seed: int, faults: int, sizes: Sizes | None = None, only: Sequence[str] = ()) -> SoakPlan:
    """A plan of so many faults, or one more; the same seed draws the same plan.

    Args:
        seed: of the draw.
        faults: how many at least.
        sizes: of the job.
        only: kinds to draw from; empty: all.

    Raises:
        ConfigError: none of the kinds opens an incident, and the others need one to strike in.
    """
    rng, chosen = Random(seed), sizes or Sizes()
    topology, episodes, count = chosen.topology(), list[Episode](), 0
    for how, kinds in _deck(rng, only, chosen.machines):
        if count >= faults:
            break
        episode = _episode(rng, topology, len(episodes) + 1, how, kinds)
        if episode is not None:
            episodes.append(episode)
            count += len(kinds)
    return SoakPlan(seed=seed, sizes=chosen, standbys=STANDBYS, other=OTHER, episodes=episodes)


def _deck(rng: Random, only: Sequence[str], machines: int) -> Iterator[tuple[How, tuple[str, ...]]]:
    """All meetings in random order, again and again; a fault that meets few others comes alone the more often."""
    known = [meeting for meeting in meetings() if not only or set(meeting[1]) <= set(only)]
    least = min((max(kind_of(kind).least for kind in kinds) for _, kinds in known), default=0)
    if least > machines:
        raise ConfigError(f"{', '.join(only)}: the job has {machines} machines, and needs {least} for that")
    known = [(how, kinds) for how, kinds in known if all(kind_of(kind).least <= machines for kind in kinds)]
    if not known:
        raise ConfigError(
            f"{', '.join(only)}: it strikes within the recovery from another fault: name one with --only too"
        )
    meets = Counter(kind for how, kinds in known if how != "alone" for kind in set(kinds))
    while known:
        cards = [kind for kind in known for _ in range(_times(*kind, meets))]
        rng.shuffle(cards)
        yield from cards


def _times(how: How, kinds: tuple[str, ...], meets: Mapping[str, int]) -> int:
    """How often a meeting is in the deck."""
    if how == "alone" and kinds[0] in BY_THEMSELVES:
        return OFTEN // 2
    if how == "alone":
        return max(1, OFTEN - meets[kinds[0]])
    return EACH_STAGE if kinds[1] in CONTROL_FAULTS else 1


def _episode(rng: Random, topology: Topology, number: int, how: How, kinds: tuple[str, ...]) -> Episode | None:
    """An episode of these kinds; None: a job of that size has no room for two such faults at different places."""
    for _ in range(PLACES):
        faults = [_fault(rng, topology, name, alone=how == "alone") for name in kinds]
        gone = _gone(faults, topology)
        if len(gone) <= STANDBYS and (how == "alone" or _apart(faults[0], faults[1], topology)):
            break
    else:
        return None
    stage, moment, other = "", rng.choice(MOMENTS), ""
    lost = any(fault.gone for fault in faults)
    if how == "alone" and lost and len(gone) < STANDBYS and rng.random() < 0.5:
        other = rng.choice(machine_names(OTHER))
    if how == "within":
        stage = rng.choice(_stages(faults[0], kinds[1]))
        if kinds[1] in CONTROL_FAULTS:
            faults[1] = DrillRequest.model_validate({"fault": kinds[1], "in_stage": stage, "moment": moment})
    return Episode(number=number, how=how, faults=faults, other=other, stage=stage, moment=moment)


def _gone(faults: Sequence[DrillRequest], topology: Topology) -> set[int]:
    """The machines that leave the job, by number: lost for good, or a rank of theirs hangs."""
    leaving = (fault for fault in faults if fault.gone or fault.fault in HANGS)
    return {machine for fault in leaving for machine in _machines(fault, topology)}


def _stages(first: DrillRequest, second: str) -> Sequence[str]:
    """Stages of the incident of the first fault in which the second can strike: ranks live in the last two only."""
    if second in RANK_FAULTS:
        return ("confirm",)
    if first.fault == "update":
        return OF_AN_UPDATE
    if first.fault in HANGS:
        return OF_A_HANG if second in CONTROL_FAULTS else OF_A_HANG[1:]
    stages = WITH_EVICTION if first.gone else WITH_RESTORE if first.fault in LOSSES else STAGES
    return (REPORT, *stages) if second in CONTROL_FAULTS else stages


def _fault(rng: Random, topology: Topology, name: str, *, alone: bool) -> DrillRequest:
    kind = kind_of(name)
    options: Options = {"fault": name}
    for option in kind.draws:
        drawn = DRAWS[option](rng, topology)
        options |= drawn if alone or option not in ("launch or then", "update") else {}
    return DrillRequest.model_validate(options)


def _apart(first: DrillRequest, second: DrillRequest, topology: Topology) -> bool:
    """Whether two faults strike at different places: one of them would not fire otherwise."""
    if second.fault in CONTROL_FAULTS:
        return True
    if first.ranks and second.ranks:
        return not set(first.ranks) & set(second.ranks)
    return not _machines(first, topology) & _machines(second, topology)


def _machines(fault: DrillRequest, topology: Topology) -> set[int]:
    """The machines that a fault strikes, by number."""
    if fault.fault == "kill-group":
        return {topology.machine(rank) for rank in topology.groups(fault.kind)[fault.index]}
    if fault.machine:
        return {machine_names(topology.machines).index(fault.machine)}
    return {topology.machine(rank) for rank in fault.ranks}
