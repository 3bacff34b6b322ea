"""What a rank's agent makes of an ``Align``; ``everstep/decisions/keep/align_backups.py`` says why. Pure.

All of it is in the rank's ``SavedState``, so that what is reported is what is
acted upon.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.align_backups import NO_NAMED_STEP
from everstep.slots.format import EMPTY, Pin


def told(state: pb.SavedState, request: pb.AlignBackupsRequest) -> None:
    """Take an Align, early or late, once or twice.

    A step that is backed up is kept until it is settled; one that is not may
    give way to a later one, and as long as nothing is whole also to none. A step
    that was saved already is not adopted: its slot may be gone before it is
    reserved. What is whole without this rank, since it backed up on its own at that
    time, is not for it.
    """
    settled = request.settled >= state.backup_named
    if request.named == NO_NAMED_STEP:
        unkept = pending(state) and not state.backup_whole and request.settled == state.backup_named - 1
        if settled or unkept:
            state.backup_named = state.backup_whole = 0
        return
    if state.backup_named != NO_NAMED_STEP and request.whole >= (state.backup_whole or state.backup_named):
        state.backup_whole = request.whole
    if (settled or pending(state)) and 0 <= state.own_step < request.named > state.backup_named:
        if state.backup_named == NO_NAMED_STEP:
            state.backup_calm = 0
        state.backup_named = request.named


def pending(state: pb.SavedState) -> int:
    """The named step that is to be backed up; 0: none, it is done or each machine is free."""
    return state.backup_named if state.backup_step < state.backup_named else NO_NAMED_STEP


def kept(state: pb.SavedState, step: int, every: int) -> None:
    """The peer has a step; ``every`` is ``backup_every_steps``."""
    state.backup_step = step
    if step == state.backup_named:
        state.backup_calm = state.backup_calm + 1 if state.own_step - step < every else 0


def pins(state: pb.SavedState, sending: int, sent: int) -> list[tuple[Pin, int]]:
    """What the rank's saves should spare, in the order in which it is pinned: a kill in between must promise nothing.

    Args:
        state: The rank's.
        sending: The step that is being sent; -1: none.
        sent: The newest that the peer has, as long as it is worth a slot; -1: none.
    """
    if state.backup_named == NO_NAMED_STEP:
        return [(Pin.NAMED, EMPTY), (Pin.KEEP, sent), (Pin.BACKUP, sending)]
    whole = state.backup_whole
    return [(Pin.BACKUP, EMPTY if whole else sent), (Pin.KEEP, whole or EMPTY), (Pin.NAMED, state.backup_named)]


def remember(state: pb.SavedState, pinned: Mapping[Pin, int]) -> None:
    """What an agent that was restarted knew, from what it had pinned."""
    state.backup_step = pinned[Pin.KEEP]
    if pinned[Pin.NAMED] > 0:
        state.backup_named, state.backup_whole = pinned[Pin.NAMED], max(pinned[Pin.KEEP], 0)
        state.backup_step = max(pinned[Pin.BACKUP], pinned[Pin.KEEP])


def lost(state: pb.SavedState, named: int) -> None:
    """The named step cannot be backed up: it was not saved, is damaged, or its slot was needed for other things.

    With a lower name for one that its saves have passed, everybody knows.
    """
    if state.backup_named == named:
        state.backup_named = max(1, min(state.backup_step, named - 1))
