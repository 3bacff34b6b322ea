"""NCCL's RAS report (``ncclras -v -f json``): collectives that each rank launched, by communicator, and who is silent.

By the source of NCCL 2.29 and the answer of NCCL 2.28.9 on one GPU; no hang of several GPUs was at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.decisions.blame.hang.rank_samples import CommunicationRecord, PendingOperation, RankSample
from everstep.dumps.unreadable import UNREADABLE, rank_number
from everstep.errors import DumpError

Process = tuple[str, int, int]
"""Host, process and device: the same GPU of the same process is the same rank, in each communicator."""
Groups = dict[str, tuple[int, ...]]
"""Communicator → its ranks."""


def parse_ras(name: str, data: bytes) -> dict[str, Any]:
    """The report's own dictionary.

    Raises:
        DumpError: it is none.
    """
    try:
        found = json.loads(data)
        if not isinstance(found["communicators"], list):
            raise ValueError("it has no communicators")
    except UNREADABLE as error:
        raise DumpError(f"{name} is no report of NCCL's RAS ({error}): ask `ncclras -v -f json`") from error
    return dict(found)


def ras_evidence(found: Mapping[str, Any], name: str = "the report") -> tuple[dict[int, RankSample], Groups]:
    """The evidence of each rank, and the ranks of each communicator.

    Ranks of a communicator are numbered within it; the largest one has all ranks of the job and gives their numbers.
    The collectives that a rank launched are summed: a rank with fewer than another rank is behind it.

    Raises:
        DumpError: it has no communicator, or lacks a field.
    """
    try:
        comms = sorted(found["communicators"], key=lambda comm: -int(comm["size"]))
        if not comms:
            raise DumpError(f"{name} has no communicators: ask again while the job hangs")
        ranks = {_process(member): rank_number(member["rank"]) for member in _members(comms[0])}
        if len(everybody := {_process(member) for comm in comms for member in _members(comm)}) > len(ranks):
            raise DumpError(
                f"{name} has {len(everybody)} ranks and no communicator of all of them (the largest has {len(ranks)}): "
                "which rank of the job each is cannot be told; use flight records"
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
