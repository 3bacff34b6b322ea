"""Estimates whether a rung is worth its price: what it costs, and what it is expected to save.

A restart costs seconds. Tests of the machines and a replay cost minutes of the whole job. Tests and replays are worth
their price if the fault returns often, if they are likely to find it, or if it returns at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from types import MappingProxyType

from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.finding import Owner
from everstep.model.ladder import Rung

LIKELY: Mapping[str, float] = MappingProxyType(
    {
        Owner.MACHINE: 0.9,
        Owner.NETWORK: 0.5,
        FaultClass.NAN: 0.5,
        FaultClass.CUDA_ERROR: 0.3,
        FaultClass.NCCL_ERROR: 0.3,
        FaultClass.HANG: 0.3,
        FaultClass.CONNECTION_LOST: 0.1,
        FaultClass.CRASHED: 0.1,
        FaultClass.KILLED: 0.02,
        FaultClass.TERMINATED: 0.02,
    }
)
"""Owner or class of a fault → the assumed probability that tests or a replay find a machine that causes it."""
USUALLY = 0.2
"""The assumed probability for all other owners and classes."""
COSTS: Mapping[Rung, float] = MappingProxyType({Rung.DIAGNOSE: 300.0, Rung.REPLAY: 600.0})
"""Rung → its assumed duration until it was measured, seconds."""
HORIZON_S = 24 * 3600.0
"""The period over which savings are counted, seconds: a fault that is not found returns several times in it."""


TRAINS_ON = 20.0
"""A job trains well if it trains between two failures for at least this many times the duration of a restart. Then it
trains for 95 % of its time."""


def trains_well(gain_s: float | None, restart_s: float) -> bool:
    """Return whether a job trains far longer between two failures than a restart costs; False if that is not known."""
    return gain_s is not None and restart_s > 0 and gain_s >= TRAINS_ON * restart_s


def likely(owner: str, fault: str) -> float:
    """Return the probability that tests or a replay find a machine that causes a fault."""
    return LIKELY.get(owner, LIKELY.get(fault, USUALLY))


SAME_STEP = 0.001
"""The assumed probability that a failure happens at the step of an earlier failure only by chance."""
BY_CHANCE = 0.1
"""Failures at the same place count as having one cause if the probability that this is chance is at most this."""


def chance_of(earlier: Sequence[tuple[str, int]], machine: str, step: int, machines: int) -> float:
    """Return the probability that a failure is on the machine, or at the step, of earlier failures only by chance.

    Args:
        earlier: The machine (empty: not known) and the step (-1: not known) of each earlier failure.
        machine: The machine of the failure; empty: it is not known.
        step: The step of the failure; -1: it is not known.
        machines: The number of machines of the job.
    """
    same_machine = sum(other == machine for other, _ in earlier) if machine else 0
    same_step = sum(other == step for _, other in earlier) if step >= 0 else 0
    by_machine: float = comb(len(earlier), same_machine) / machines**same_machine
    by_step: float = SAME_STEP**same_step
    return min(by_machine, 1.0) * by_step


def updated(probability: float, chance: float) -> float:
    """Return the probability that a machine is the cause, raised because failures were at one place (Bayes' rule)."""
    return probability / (probability + (1.0 - probability) * chance)


def saving_s(probability: float, gain_s: float, restart_s: float) -> float:
    """Return the time that a rung is expected to save, seconds.

    Args:
        probability: The probability that it finds the cause.
        gain_s: The time that the job trained between the last two failures.
        restart_s: The time that a restart costs.
    """
    return probability * restart_s * HORIZON_S / max(gain_s, 1.0)
