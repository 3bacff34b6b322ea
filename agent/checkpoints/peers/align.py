"""This module applies an ``AlignBackups`` to a rank; ``everstep/decisions/keep/align_backups.py`` has the reasons.

The functions read and change the rank's ``SavedState``, so the agent acts on exactly the state that it reports.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.align_backups import NO_NAMED_STEP
from everstep.slots.format import EMPTY, Pin


def apply(state: pb.SavedState, request: pb.AlignBackupsRequest) -> None:
    """Apply an AlignBackups, which may arrive early, late or twice.

    A named step that is backed up is kept until it is settled. A named step that is not backed up yet may be
    replaced by a later step, or be dropped while no step is complete. The rank does not adopt a step that it has
    saved already, because that step's slot may be overwritten before it is reserved. A rank without a named step
    backs up on its own, so it ignores which step is complete.
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
    """Return the named step that must still be backed up; 0: the step is done, or no step is named."""
    return state.backup_named if state.backup_step < state.backup_named else NO_NAMED_STEP


def kept(state: pb.SavedState, step: int, every: int) -> None:
    """Record that the peer has a step; ``every`` is ``backup_every_steps``."""
    state.backup_step = step
    if step == state.backup_named:
        state.backup_calm = state.backup_calm + 1 if state.own_step - step < every else 0


def pins(state: pb.SavedState, sending: int, sent: int) -> list[tuple[Pin, int]]:
    """Return the pins of the steps whose slots the rank's saves should spare.

    The pins have to be set in this order: if the agent is killed in between, they still describe a safe state.

    Args:
        state: State of the rank.
        sending: The step that is being sent; -1: none.
        sent: The newest step that the peer has, as long as its slot should be spared; -1: none.
    """
    if state.backup_named == NO_NAMED_STEP:
        return [(Pin.NAMED, EMPTY), (Pin.KEEP, sent), (Pin.BACKUP, sending)]
    whole = state.backup_whole
    return [(Pin.BACKUP, EMPTY if whole else sent), (Pin.KEEP, whole or EMPTY), (Pin.NAMED, state.backup_named)]


def remember(state: pb.SavedState, pinned: Mapping[Pin, int]) -> None:
    """Restore the state that the agent had before its restart, from the pins of the rank's slots."""
    state.backup_step = pinned[Pin.KEEP]
    if pinned[Pin.NAMED] > 0:
        state.backup_named, state.backup_whole = pinned[Pin.NAMED], max(pinned[Pin.KEEP], 0)
        state.backup_step = max(pinned[Pin.BACKUP], pinned[Pin.KEEP])


def lost(state: pb.SavedState, named: int) -> None:
    """Record that the named step cannot be backed up: it was not saved, is damaged, or its slot was reused.

    The rank then reports a lower named step, although its saves are newer. This shows the loss to all machines.
    """
    if state.backup_named == named:
        state.backup_named = max(1, min(state.backup_step, named - 1))
