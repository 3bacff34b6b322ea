"""This module converts the pace of a rank's saves to messages and back."""

from __future__ import annotations

from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.save_pace import Paced, PaceOrder
from everstep.model.save_pace import SavePace
from everstep.rank.step_reports import ReportFile


def saves_of(report: ReportFile) -> pb.PacedSaves:
    """Return the pace of a rank's saves, and their times."""
    times = report.save_times()
    return pb.PacedSaves(
        asked=_message(report.asked_pace()),
        pace=_message(report.pace()),
        wanted=times.wanted,
        save_s=times.save_s,
        step_s=times.step_s,
    )


def paced(rank: pb.RankProgress) -> Paced | None:
    """Return the pace of a rank's saves; None: it is not known."""
    if not rank.HasField("saves"):
        return None
    saves = rank.saves
    return Paced(rank.rank, asked=_pace(saves.asked), pace=_pace(saves.pace), wanted=saves.wanted)


def request_of(job: str, generation: int, order: PaceOrder) -> pb.PaceSavesRequest:
    """Return the request to move to another pace."""
    pace, following = _message(order.pace), _message(order.following)
    return pb.PaceSavesRequest(job=job, generation=generation, pace=pace, following=following)


def order_of(request: pb.PaceSavesRequest) -> PaceOrder:
    """Return the message that a request has."""
    return PaceOrder(_pace(request.pace), _pace(request.following))


def _message(pace: SavePace) -> pb.SavePace:
    return pb.SavePace(number=pace.number, every=pace.every, waits=pace.waits)


def _pace(message: pb.SavePace) -> SavePace:
    return SavePace(message.number, message.every, message.waits)
