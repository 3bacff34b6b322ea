"""Chooses after how many steps all ranks of a job save, so that saves that take longer than a step do not delay it.

Ranks that save after different steps may have no step in common. So the ranks change their *pace* together, in moves
after which they are always safe beside ranks that have not made the move yet:

    every step → every step, waiting → every 2 steps, waiting → every 4 steps, waiting → every 4 steps

A rank whose pace is *waiting* continues only when its save is committed. So all ranks have committed the newest step at
which a rank at twice the distance saved, and three slots per rank suffice to keep it. Without waiting they would not:
a rank may still write a step while another one has overwritten the step before it.

The watchers ask all ranks to make one move, wait until every rank has shown that it has made it, and ask for the next.
Rank 0 moves first. Its moves are numbered and never taken back, and the watchers send them to all other ranks. So
messages may be late, lost or repeated, there may be several watchers, and agents and workers may be restarted: no two
ranks are ever more than one move apart. While no watcher is there, every rank keeps its pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everstep.model.save_pace import SavePace


@dataclass(frozen=True, slots=True)
class Paced:
    """The pace of one rank, as its machine shows it."""

    rank: int
    asked: SavePace
    """The pace to which the rank was asked to move last."""
    pace: SavePace
    """The pace to which it has moved."""
    wanted: int
    """The distance between saves that it needs, in steps: a power of two."""


@dataclass(frozen=True, slots=True)
class PaceOrder:
    """The message of the watchers to all machines."""

    pace: SavePace
    """The pace of rank 0, to which the other ranks move."""
    following: SavePace
    """The pace to which rank 0 moves; its own pace: it does not move."""


def towards(pace: SavePace, wanted: int) -> SavePace:
    """Return the pace after the next move towards a distance between saves; ``pace``: it has the distance."""
    if wanted == pace.every:
        return SavePace(pace.number + 1, pace.every) if pace.waits else pace
    if not pace.waits:
        return SavePace(pace.number + 1, pace.every, True)
    return SavePace(pace.number + 1, 2 * pace.every if wanted > pace.every else pace.every // 2, True)


def order_pace(ranks: Sequence[Paced], world_size: int, most: int) -> PaceOrder | None:
    """Return the message for all machines; None: every rank has the pace that the slowest rank needs.

    Args:
        ranks: The living ranks of one generation, as their machines last showed them.
        world_size: The number of ranks of the job. No rank moves while a rank is not shown.
        most: The largest distance between saves, in steps.
    """
    if len(ranks) < world_size:
        return None
    pace = next(rank.asked for rank in ranks if rank.rank == 0)
    if any(rank.pace.number < pace.number for rank in ranks):
        return PaceOrder(pace, pace)
    following = towards(pace, min(max(rank.wanted for rank in ranks), most))
    return None if following == pace else PaceOrder(pace, following)


def obeyed(rank: int, asked: SavePace, order: PaceOrder) -> SavePace:
    """Return the pace to which a rank is asked to move after a message, which may be late or repeated.

    Args:
        rank: The rank.
        asked: The pace to which it was asked to move before.
        order: The message.
    """
    if rank == 0:
        return order.following if order.pace == asked else asked
    return order.pace if order.pace.number == asked.number + 1 else asked


class Turn(NamedTuple):
    """What a rank does at the end of a step."""

    saves: bool
    waits: bool
    """Training waits until this save is committed."""


@dataclass(slots=True)
class SaveSchedule:
    """The saves of one rank.

    The rank shows that it has moved to a pace only after a save at it, and with a waiting pace after its commit. Until
    then it may have no step in common with a rank that is a move ahead.

    Args:
        pace: The pace with which the rank begins.
    """

    pace: SavePace

    def end_step(self, completed_steps: int, asked: SavePace, *, always: bool = False) -> Turn:
        """Return what the rank does at the end of a step. Call it once for each step.

        Args:
            completed_steps: The completed steps of the rank.
            asked: The pace to which it is asked to move.
            always: Whether all ranks save after this step at any pace.
        """
        if asked.number > self.pace.number:
            self.pace = asked
        if always or completed_steps % self.pace.every == 0:
            return Turn(saves=True, waits=self.pace.waits)
        return Turn(saves=False, waits=False)
