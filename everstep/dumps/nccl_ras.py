"""Reads NCCL's RAS report (``ncclras -v -f json``): the collectives of each rank by communicator, and silent ranks.

The reader follows the source of NCCL 2.29, and was run on a report of NCCL 2.28.9 of one GPU. It was not tried on a
hang of several GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.decisions.blame.hang.rank_samples import CommunicationRecord, PendingOperation, RankSample
from everstep.dumps.unreadable import UNREADABLE, rank_number
from everstep.errors import DumpError

Process = tuple[str, int, int]
"""Host, process and device, which identify a rank in all communicators."""
Groups = dict[str, tuple[int, ...]]
"""Communicator → its ranks."""


def parse_ras(name: str, data: bytes) -> dict[str, Any]:
    """The dictionary of a report, as NCCL wrote it.

    Raises:
        DumpError: the file is not a RAS report.
    """
    try:
        report = json.loads(data)
        if not isinstance(report["communicators"], list):
            raise ValueError("it has no communicators")
    except UNREADABLE as error:
        raise DumpError(f"{name} is not a report of NCCL's RAS ({error}): run `ncclras -v -f json`") from error
    return dict(report)


def ras_evidence(report: Mapping[str, Any], name: str = "the report") -> tuple[dict[int, RankSample], Groups]:
    """The evidence of each rank, and the ranks of each communicator.

    A communicator numbers its own ranks. The largest communicator has all ranks of the job, so its numbers are used.
    The collectives that a rank launched are summed: a rank with fewer of them than another rank is behind it.

    Raises:
        DumpError: the report has no communicator, or lacks a field.
    """
    try:
        comms = sorted(report["communicators"], key=lambda comm: -int(comm["size"]))
        if not comms:
            raise DumpError(f"{name} has no communicators: get a new report while the job hangs")
        ranks = {_process(member): rank_number(member["rank"]) for member in _members(comms[0])}
        if len(processes := {_process(member) for comm in comms for member in _members(comm)}) > len(ranks):
            raise DumpError(
                f"{name} has {len(processes)} ranks but no communicator of all of them (the largest has {len(ranks)}), "
                "so their ranks in the job are not known: use flight records"
            )
        last: dict[int, dict[str, int]] = {rank: {} for rank in ranks.values()}
        pending: dict[int, list[PendingOperation]] = {rank: [] for rank in ranks.values()}
        groups, silent = {}, set()
        for comm in comms:
            group = f"{comm['hash']} {comm['secondary_hash']}"
            members = {ranks[_process(member)] for member in _members(comm) if _process(member) in ranks}
            counts = {
                ranks[_process(member)]: sum(map(int, member["collective_counts"].values()))
                for member in comm["ranks"]
                if _process(member) in ranks
            }
            groups[group] = tuple(sorted(members))
            silent |= {
                ranks[_process(member)] for member in comm.get("missing_ranks") or [] if _process(member) in ranks
            }
            ahead = max(counts.values(), default=0)
            for rank, count in counts.items():
                last[rank][group] = count
                if count == ahead and (min(counts.values()) < ahead or members - counts.keys()):
                    pending[rank].append(PendingOperation(group, ahead, "collective"))
    except UNREADABLE as error:
        raise DumpError(f"{name}: a communicator cannot be read ({error!r})") from error
    evidence = {
        rank: RankSample(record=CommunicationRecord(last[rank], tuple(pending[rank])))
        for rank in ranks.values()
        if rank not in silent
    }
    return evidence | {rank: RankSample(is_unresponsive=True) for rank in silent}, groups


def _members(comm: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [*comm["ranks"], *(comm.get("missing_ranks") or [])]


def _process(member: Mapping[str, Any]) -> Process:
    return str(member["host"]), int(member["pid"]), int(member["cuda_dev"])
