"""Converts times in agents' messages to the receiver's clock (see ``everstep/decisions/clocks.py``)."""

from __future__ import annotations

from agent.v1 import agent_pb2 as pb
from everstep.decisions.clocks import shift_ns, stream_shift_ns


def fit_stop(reply: pb.StopReply, *, asked_ns: int, heard_ns: int) -> None:
    """Correct the times at which ranks ended, so that they can be compared across machines."""
    shift = shift_ns(reply.now_ns, asked_ns=asked_ns, heard_ns=heard_ns)
    for rank in reply.ranks if shift else ():
        if rank.exit.time_ns:
            rank.exit.time_ns += shift


def fit_milestones(reply: pb.ProgressReply, *, heard_ns: int) -> None:
    """Correct the times of the ranks' milestones, so that the slowest rank of all machines can be identified."""
    shift = stream_shift_ns(reply.time_ns, heard_ns)
    for rank in reply.ranks if shift else ():
        for mark, at_ns in rank.milestones.ListFields():
            setattr(rank.milestones, mark.name, at_ns + shift)
