"""Changes times in agents' messages to the clock of the receiver; ``everstep/decisions/clocks.py`` says when."""

from __future__ import annotations

from agent.v1 import agent_pb2 as pb
from everstep.decisions.clocks import shift_ns, stream_shift_ns


def fit_stop(reply: pb.StopReply, *, asked_ns: int, heard_ns: int) -> None:
    """Change when ranks ended, so that their order holds across machines."""
    shift = shift_ns(reply.now_ns, asked_ns=asked_ns, heard_ns=heard_ns)
    for rank in reply.ranks if shift else ():
        if rank.exit.time_ns:
            rank.exit.time_ns += shift


def fit_milestones(reply: pb.ProgressReply, *, heard_ns: int) -> None:
    """Change when ranks got where, so that the slowest one is found across machines."""
    shift = stream_shift_ns(reply.time_ns, heard_ns)
    for rank in reply.ranks if shift else ():
        for mark, at_ns in rank.milestones.ListFields():
            setattr(rank.milestones, mark.name, at_ns + shift)
