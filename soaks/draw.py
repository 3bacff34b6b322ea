"""Draws the plan of a soak: each fault alone, and each pair that can meet, before any of these repeats. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from drills.faults.all import FAULTS, fault_named, make_fault
from drills.faults.control_plane import ControlFault
from drills.faults.fault import Fault
from drills.faults.updates import Update
from drills.spec.fault import OnRanks
from drills.spec.settings import machine_names
from drills.spec.stages import MOMENTS, REPORT
from everstep.errors import ConfigError
from everstep.model.topology import Topology
from soaks.plan import Episode, How, Sizes, SoakPlan

DRAWS = 100
"""If two faults strike the same target in all of this many draws, they cannot strike different targets."""
MEET_AWAY = ("kill-rank", "kill-machine")
"""Faults that strike while a part is away."""
OFTEN = 8
"""Each kind of fault is drawn at least this many times before all meetings repeat."""
EACH_STAGE = 3
"""A fault in a stage of another fault's incident is drawn this many times as often as other meetings, since an incident
has several stages."""
STANDBYS = 2
"""Number of standbys (``SoakPlan.standbys``), which is also the largest number of machines that are lost for good at
the same time."""
OTHER = 2
"""Number of machines of the second job (``SoakPlan.other``)."""


def soaked() -> list[type[Fault]]:
    """Return the faults that a soak draws."""
    return [fault for fault in FAULTS if not fault.not_soaked]


def left_out() -> dict[str, str]:
    """Fault → why no soak draws it."""
    return {fault.name: fault.not_soaked for fault in FAULTS if fault.not_soaked}


def meetings() -> list[tuple[How, tuple[str, ...]]]:
    """Return all meetings of faults: each fault alone, and each pair that can meet, at one step or within a
    recovery."""
    faults = soaked()
    opening = [fault for fault in faults if fault.meets == "opening"]
    beside = [fault for fault in faults if fault.meets in ("opening", "beside")]
    control = [fault for fault in faults if fault.meets == "stage"]
    found: list[tuple[How, tuple[str, ...]]] = [("alone", (fault.name,)) for fault in faults if fault not in control]
    found += [
        ("together", (first.name, second.name)) for index, first in enumerate(beside) for second in beside[index:]
    ]
    found += [("together", (first, fault.name)) for first in MEET_AWAY for fault in faults if fault.meets == "away"]
    found += [("within", (first.name, second.name)) for first in opening for second in (*beside, *control)]
    return found + [("within", (Update.name, second.name)) for second in control]


def draw(seed: int, faults: int, sizes: Sizes | None = None, only: Sequence[str] = ()) -> SoakPlan:
    """Draw a plan with this many faults, or with one more. Equal seeds give equal plans.

    Args:
        seed: Seed of the random numbers.
        faults: Smallest number of faults.
        sizes: Sizes of the job.
        only: Names of the faults to draw from; empty: all.

    Raises:
        ConfigError: the job is too small for these faults, or each of them needs another fault's incident.
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
    """Yield all meetings in random order, again and again. A fault that meets few others is drawn alone more often."""
    possible = [meeting for meeting in meetings() if not only or set(meeting[1]) <= set(only)]
    least = min((max(fault_named(kind).least_machines for kind in kinds) for _, kinds in possible), default=0)
    if least > machines:
        raise ConfigError(f"{', '.join(only)}: the job has {machines} machines, and needs {least}")
    possible = [
        (how, kinds) for how, kinds in possible if all(fault_named(kind).least_machines <= machines for kind in kinds)
    ]
    if not possible:
        raise ConfigError(f"{', '.join(only)} strikes within the recovery from another fault: add one with --only")
    meets = Counter(kind for how, kinds in possible if how != "alone" for kind in set(kinds))
    while possible:
        cards = [meeting for meeting in possible for _ in range(_times(*meeting, meets))]
        rng.shuffle(cards)
        yield from cards


def _times(how: How, kinds: tuple[str, ...], meets: Mapping[str, int]) -> int:
    """Return how many times a meeting is in the deck."""
    if how == "alone" and fault_named(kinds[0]).seldom:
        return OFTEN // 2
    if how == "alone":
        return max(1, OFTEN - meets[kinds[0]])
    return EACH_STAGE if fault_named(kinds[1]).is_control else 1


def _episode(rng: Random, topology: Topology, number: int, how: How, kinds: tuple[str, ...]) -> Episode | None:
    """Return an episode of these faults; None: in a job of this size, two such faults always strike the same target."""
    for _ in range(DRAWS):
        faults = [_fault(rng, topology, name, alone=how == "alone") for name in kinds]
        leaving = _leaving(faults, topology)
        if len(leaving) <= STANDBYS and (how == "alone" or _apart(faults[0], faults[1], topology)):
            break
    else:
        return None
    stage, moment, other = "", rng.choice(MOMENTS), ""
    lost = any(fault.stays_away for fault in faults)
    if how == "alone" and lost and len(leaving) < STANDBYS and rng.random() < 0.5:
        other = rng.choice(machine_names(OTHER))
    if how == "within":
        stage = rng.choice(_stages(faults[0], faults[1]))
        if faults[1].is_control:
            faults[1] = make_fault(kinds[1], {"in_stage": stage, "moment": moment})
    return Episode(number=number, how=how, faults=faults, other=other, stage=stage, moment=moment)


def _leaving(faults: Sequence[Fault], topology: Topology) -> set[int]:
    """Return the positions of the machines that leave the job: they are lost for good, or have a rank that hangs."""
    striking = (fault for fault in faults if fault.stays_away or fault.hangs)
    return {machine for fault in striking for machine in fault.named_machines(topology)}


def _stages(first: Fault, second: Fault) -> Sequence[str]:
    """Return the stages of the first fault's incident in which the second fault can strike. Ranks run only in the last
    stage."""
    if second.by_ranks:
        return ("confirm",)
    if second.is_control:
        return first.stages if first.is_update or first.hangs else (REPORT, *first.stages)
    return first.stages[1:] if first.hangs else first.stages


def _fault(rng: Random, topology: Topology, name: str, *, alone: bool) -> Fault:
    kind = fault_named(name)
    return make_fault(name, {} if issubclass(kind, ControlFault) else kind.draw(rng, topology, alone=alone))


def _apart(first: Fault, second: Fault, topology: Topology) -> bool:
    """Return whether two faults strike different targets: otherwise one of them would not fire."""
    if second.is_control:
        return True
    if _ranks(first) and _ranks(second):
        return not _ranks(first) & _ranks(second)
    return not first.named_machines(topology) & second.named_machines(topology)


def _ranks(fault: Fault) -> set[int]:
    return set(fault.ranks) if isinstance(fault, OnRanks) else set()
