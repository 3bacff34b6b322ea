"""What a rank's agent makes of an ``Align``; ``everstep/decisions/align.py`` says why. Pure.

All of it is in the rank's ``SavedState``, so that what is reported is what is
acted upon.
"""

from __future__ import annotations

from agent.v1 import agent_pb2 as pb
from everstep.decisions.align import FREE


def told(state: pb.SavedState, request: pb.AlignRequest) -> None:
    """Take an Align, early or late, once or twice.

    A step that is backed up is kept until it is settled; one that is not may
    give way to a later one. A step that was saved already is not adopted: its
    slot may be gone before it is reserved.
    """
    settled = request.settled >= state.backup_named
    if request.named == FREE:
        if settled:
            state.backup_named = state.backup_whole = 0
        return
    if state.backup_named != FREE:
        state.backup_whole = max(state.backup_whole, request.whole)
    if (settled or pending(state)) and 0 <= state.own_step < request.named > state.backup_named:
        state.backup_named = request.named
        state.backup_whole = max(state.backup_whole, request.whole)


def pending(state: pb.SavedState) -> int:
    """The named step that is to be backed up; 0: none, it is done or each machine is free."""
    return state.backup_named if state.backup_step < state.backup_named else FREE


def lost(state: pb.SavedState, named: int) -> None:
    """The named step cannot be backed up: it was not saved, is damaged, or its slot was needed for other things.

    With a lower name for one that its saves have passed, everybody knows.
    """
    if state.backup_named == named:
        state.backup_named = max(1, min(state.backup_step, named - 1))
