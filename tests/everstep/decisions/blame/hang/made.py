"""Makes stacks, flight records and samples for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.decisions.blame.hang.rank_samples import CommunicationRecord, JobSamples, PendingOperation, RankSample
from everstep.decisions.blame.hang.stacks import ProcessRole, Signature, StackFrame, normalise

TORCH = "torch/distributed/distributed_c10d.py"
FIGURE_7 = "16,2,dp=4,pp=4,tp=2"
"""The topology in figure 7 of ByteRobust: TP 2, PP 4, DP 4, and two GPUs on each machine (machine = dp·4 + pp)."""


def stack(*functions: str, role: ProcessRole | None = None) -> Signature:
    """Return the activity of a rank in these functions, the outermost first.

    ``name`` is a function in ``train.py``, and ``name@file`` is a function in another file.
    """
    frames = [
        StackFrame(name, file or "train.py", 1) for name, _, file in (function.partition("@") for function in functions)
    ]
    return normalise(frames[::-1], role)


SYNC = stack("train", "step", f"all_reduce@{TORCH}")
COMPUTES = stack("train", "forward")
STUCK = stack("train", "forward", "load")


def of_stacks(stacks: Mapping[int, Signature]) -> JobSamples:
    """Return the samples of a job that is known to hang. They have a stack of each rank."""
    return JobSamples({rank: RankSample(one) for rank, one in stacks.items()}, is_hung=True)


def figure_7() -> dict[int, Signature]:
    """Return the stacks of all ranks in figure 7, which shows a hang in the backward pass."""
    backward = ("train", "forward_backward")
    found = dict.fromkeys(range(24), stack("train", "optimizer_step", f"reduce_scatter_tensor@{TORCH}"))
    for machine, leaf in {
        12: ("recv_backward", f"irecv@{TORCH}"),
        13: ("recv_backward", f"irecv@{TORCH}"),
        14: ("send_backward", f"isend@{TORCH}"),
        15: ("backward_step", f"all_gather_into_tensor@{TORCH}"),
    }.items():
        found |= dict.fromkeys((2 * machine, 2 * machine + 1), stack(*backward, *leaf))
    return found


def record(last: Mapping[str, int], *pending: tuple[str, int], order: Sequence[str] = ()) -> CommunicationRecord:
    """Return the record of a rank.

    Args:
        last: Group → the number of the rank's newest collective.
        pending: Group and number of each collective that the rank has not completed.
        order: The groups of the newest collectives, in the order in which the rank entered them.
    """
    counts: dict[str, int] = {}
    newest = []
    called = tuple(dict.fromkeys(order))
    for group in reversed(order):
        newest.append((called.index(group), last[group] - counts.setdefault(group, 0), False))
        counts[group] += 1
    inside = tuple(PendingOperation(group, number, "all_reduce") for group, number in pending)
    return CommunicationRecord(last, inside, tuple(reversed(newest)), called)


def of_records(records: Mapping[int, CommunicationRecord], groups: Mapping[str, tuple[int, ...]]) -> JobSamples:
    """Return the samples of a job. They have a record of each rank."""
    return JobSamples({rank: RankSample(record=one) for rank, one in records.items()}, groups)
