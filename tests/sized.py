"""Jobs of any size, as their machines would report them, and what a call costs at two sizes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache

from agent.v1 import agent_pb2 as pb
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

RANKS = 8
"""The number of ranks of each machine."""
NOW_NS = 10**18
SMALL, LARGE = 1000, 4000
"""The two compared sizes, in machines."""
MOST = 9.0
"""The largest allowed cost at the large size, divided by the cost at the small size: 4 is linear, 16 quadratic. It is 3
for each doubling of the machines."""


@cache
def job(machines: int, pp: int = 4) -> JobSpec:
    """Return a job whose tp groups are within a machine."""
    return JobSpec(name="large", script="/job.py", machines=machines, ranks_per_machine=RANKS, tp=RANKS, pp=pp)


@cache
def machines_of(count: int) -> list[Machine]:
    """Return machines whose names have the same length, in racks of 16."""
    return [
        Machine(name=f"machine-{n:04d}", address=f"10.0.{n // 250}.{n % 250}:7070", domain=f"rack-{n // 16}")
        for n in range(count)
    ]


def ranks_of(machine: int) -> range:
    """Return the ranks of a machine."""
    return range(RANKS * machine, RANKS * (machine + 1))


def stop_reply(
    machine: int, machines: int, *, raised: bool = False, steps: tuple[int, ...] = (99, 100)
) -> pb.StopReply:
    """Return a machine's answer to a stop: how its ranks ended, and the copies of their states and of a neighbour's."""
    neighbour = (machine + 1) % machines
    kinds = [(pb.HeldCheckpoint.OWN, ranks_of(machine)), (pb.HeldCheckpoint.BACKUP, ranks_of(neighbour))]
    return pb.StopReply(
        ranks=[
            pb.RankEnd(
                rank=rank,
                pid=1000 + rank,
                exit=pb.Exit(kind=pb.Exit.CODE, value=1, time_ns=NOW_NS + rank),
                completed_steps=100,
                stopped_by_us=not raised,
                exception=f"RuntimeError: rank {rank} cannot" if raised else "",
                log_tail="line\n" * 100,
                classification=class_of(rank) if raised else None,
            )
            for rank in ranks_of(machine)
        ],
        checkpoints=[
            pb.HeldCheckpoint(
                rank=rank,
                completed_steps=step,
                valid=True,
                tier=tier,
                bytes=10**10,
                saved_ns=NOW_NS + rank,
                generation=3,
                run="a1b2c3d4e5f6",
            )
            for tier, ranks in kinds
            for rank in ranks
            for step in steps
        ],
    )


def class_of(rank: int) -> pb.Classification:
    """Return the class that an agent gives to the end of a rank that raised an exception."""
    raised = f"RuntimeError: rank {rank} cannot"
    place = "train.py:120 in main"
    return pb.Classification(
        fault="user error", owner="code", reason="user-exception", place=place, evidence=[raised, "a line", "a line"]
    )


@cache
def stop_replies(machines: int, *, raised: bool = False) -> dict[str, pb.StopReply]:
    """Return the answers of all machines to a stop."""
    return {one.name: stop_reply(index, machines, raised=raised) for index, one in enumerate(machines_of(machines))}


def progress_reply(machine: int, *, steps: int = 100, generation: int = 3) -> pb.ProgressReply:
    """Return what a machine shows of ranks that step and save."""
    return pb.ProgressReply(
        time_ns=NOW_NS,
        generation=generation,
        ranks=[
            pb.RankProgress(
                rank=rank,
                generation=generation,
                alive=True,
                attached=True,
                completed_steps=steps,
                milestones=pb.Milestones(
                    forked=1, script_entered=2, joined=3, loop_entered=4, restored=5, first_step=6
                ),
                saved=pb.SavedState(
                    own_step=steps, own_ns=NOW_NS, backup_step=steps, disk_step=64, disk_steps=[64], disk_wanted=-1
                ),
            )
            for rank in ranks_of(machine)
        ],
    )


def observation(rank: int, *, code: int, generation: int = 3) -> pb.Observation:
    """Return the observation that a rank ended."""
    machine = f"machine-{rank // RANKS:04d}"
    return pb.Observation(
        sequence=rank % RANKS + 1,
        id=f"{machine}-{rank % RANKS + 1}",
        machine=machine,
        job="large",
        generation=generation,
        time_ns=NOW_NS + rank,
        rank_ended=pb.RankEnd(
            rank=rank,
            pid=1000 + rank,
            exit=pb.Exit(kind=pb.Exit.CODE, value=code, time_ns=NOW_NS + rank),
            finished=code == 0,
            completed_steps=100,
            exception="" if code == 0 else f"RuntimeError: rank {rank} cannot",
            classification=pb.Classification(fault="none", owner="unknown") if code == 0 else class_of(rank),
        ),
    )


def growth(prepare: Callable[[int], Callable[[], object]], *, rounds: int = 10) -> float:
    """Return the CPU time of a call at the large size, divided by its CPU time at the small size.

    Garbage collections are turned off, since their cost depends on all existing objects.

    Args:
        prepare: Given a number of machines, returns the call to time.
        rounds: How often each call is timed at most. The shortest time counts, since other processes disturb it least.
            Once the ratio is small enough, a larger ratio could only be chance. The call at the small size is timed
            after the call at the large size, so both find other data in the processor's caches.
    """
    small, large = prepare(SMALL), prepare(LARGE)
    gc.disable()
    try:
        at_small = at_large = float("inf")
        for _ in range(rounds):
            at_large = min(at_large, _seconds(large))
            at_small = min(at_small, _seconds(small))
            if at_large < MOST * at_small:
                break
    finally:
        gc.enable()
    return at_large / at_small


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began
