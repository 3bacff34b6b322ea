"""Reads flight records of torch, which list a rank's collectives: JSON and, on request, pickles.

Torch writes the same keys in several ways: ``fr_trace_json`` and ``dump_nccl_trace_json`` of its worker control plane,
``_dump_fr_trace_json`` and ``_dump_nccl_trace_json`` in a process, and the files that ``TORCH_FR_DUMP_TEMP_FILE`` (or
``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) names. The reader was run on records of gloo of torch 2.15. The fields that only
NCCL fills are read as torch's source describes them.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from everstep.decisions.blame.hang.rank_samples import WORLD, CommunicationRecord, PendingOperation
from everstep.dumps.unreadable import UNREADABLE
from everstep.errors import DumpError

PICKLE = b"\x80"
"""First byte of a pickle."""
SAME_SIZES = ("all_reduce", "allreduce", "reduce_scatter", "_reduce_scatter_base", "broadcast")
"""Operations in which all ranks pass tensors of the same size."""
ORDER = 64
"""Number of newest operations of a rank whose order is kept."""
_NO_RECORD: tuple[type[Exception], ...] = (*UNREADABLE, pickle.UnpicklingError)
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The contents of a rank's flight record."""

    record: CommunicationRecord
    groups: Mapping[str, tuple[int, ...]]
    """Process group → its ranks, for the groups whose ranks are in the record."""
    labels: Mapping[str, str]
    """Process group → its description."""
    position: tuple[int, int]
    """The newest operation, and the newest one that is over. If it differs between two records, the rank progressed."""


class _PlainData(pickle.Unpickler):
    """Reads only numbers, text, lists and dicts from a pickle: it loads no class and calls no function."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class, since torch's records have none."""
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which is not plain data")


def parse_record(name: str, data: bytes, *, pickles: bool = False) -> dict[str, Any]:
    """The dictionary of a flight record, as torch wrote it.

    Args:
        name: Name of the file, for messages.
        data: Bytes of the file.
        pickles: Whether pickles may be read.

    Raises:
        DumpError: the file is not a flight record, or is a pickle and pickles may not be read.
    """
    try:
        if data[:1] == PICKLE:
            if not pickles:
                raise DumpError(
                    f"{name} is a pickle, as torch writes its records to files: add --pickles to read its plain data, "
                    "if you trust its author, or dump JSON (fr_trace_json)"
                )
            fields = _PlainData(io.BytesIO(data)).load()
        else:
            fields = json.loads(data)
        if not isinstance(fields.get("entries", []), list) or not {"entries", "pg_status", "pg_config"} & fields.keys():
            raise ValueError("it has no entries")
    except _NO_RECORD as error:
        raise DumpError(f"{name} is not a flight record of torch ({error}): dump that rank again") from error
    return dict(fields)


def flight_record(fields: Mapping[str, Any], name: str = "the record") -> FlightRecord:
    """Read the dictionary of ``parse_record``.

    Raises:
        DumpError: an entry lacks a field.
    """
    last: dict[str, int] = {}
    labels: dict[str, str] = {}
    pending: list[tuple[PendingOperation, bool]] = []
    newest = done = -1
    order: deque[tuple[str, int, bool]] = deque(maxlen=ORDER)
    try:
        groups = _groups(fields.get("pg_config") or {})
        for entry in fields.get("entries") or []:
            group, label = (*entry["process_group"], "")[:2]
            labels[group] = label
            newest = max(newest, int(entry.get("record_id", newest + 1)))
            operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
            is_p2p, number, peer = bool(entry.get("is_p2p")), int(entry["collective_seq_id"]), None
            if is_p2p:
                operation, peer = _to_peer(operation, entry, groups.get(group))
                order.append((group, int(entry.get("p2p_seq_id", -1)), True))
            else:
                last[group] = max(last.get(group, -1), number)
                order.append((group, number, False))
            if _is_done(entry):
                done = newest
            else:
                sizes = str(entry.get("input_sizes", "")) if operation.startswith(SAME_SIZES) else ""
                one = PendingOperation(group, number, operation, sizes, peer, is_p2p)
                pending.append((one, entry.get("state") == "started"))
    except UNREADABLE as error:
        raise DumpError(
            f"{name}: an entry of the flight record cannot be read ({error!r}; version of the record: "
            f"{fields.get('version', 'unknown')}): dump that rank again, or remove the file"
        ) from error
    inside = _inside(pending)
    for one, _ in pending:
        if not one.is_p2p and one not in inside:
            last[one.group] = min(last[one.group], one.number - 1)
    called = tuple(dict.fromkeys(group for group, _, _ in order))
    index = {group: number for number, group in enumerate(called)}
    calls = tuple((index[group], number, is_p2p) for group, number, is_p2p in order)
    record = CommunicationRecord(last, inside, calls, called)
    labels = {group: text for group, text in labels.items() if text != "undefined"}
    return FlightRecord(record, groups, labels, (newest, done))


def _inside(pending: Sequence[tuple[PendingOperation, bool]]) -> tuple[PendingOperation, ...]:
    """Return the operations that a rank is inside: the oldest started operation of each stream.

    A rank of a GPU enqueues operations far ahead. Those that are only scheduled wait for older operations of the same
    rank, so the rank has not reached them. If no operation is started (gloo, and NCCL without
    ``TORCH_NCCL_ENABLE_TIMING``, do not record that), the rank is inside its oldest operation.
    """
    started: dict[tuple[str, bool, int | None], PendingOperation] = {}
    for one, is_started in pending:
        if is_started:
            started.setdefault((one.group, one.is_p2p, one.peer), one)
    return tuple(started.values()) or tuple(one for one, _ in pending[:1])


def _is_done(entry: Mapping[str, Any]) -> bool:
    """Whether an operation is over. Gloo sets only ``retired``; NCCL sets ``retired`` and, later, ``state``."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _to_peer(operation: str, entry: Mapping[str, Any], members: tuple[int, ...] | None) -> tuple[str, int | None]:
    """``send`` or ``recv`` of a point-to-point operation, and the peer's rank in the job; None: not known.

    The name of the operation has the peer's rank within the process group, whose ranks are ``members``.
    """
    if (match := _P2P.match(operation)) is None:
        return operation, None
    direction, peer = match[1], int(match[3])
    if members is None:
        return direction, peer if entry["process_group"][0] == WORLD else None
    return direction, members[peer] if peer < len(members) else None


def _groups(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Process groups with their ranks. Groups without a name or without ranks, as gloo writes them, are left out."""
    groups = {}
    for key, group in config.items():
        ranks = group.get("ranks", "") if isinstance(group, Mapping) else ""
        numbers = _ranks(ranks if isinstance(ranks, str) else str(ranks))
        if numbers and key:
            groups[str(group.get("name") or key)] = numbers
    return groups


@lru_cache(maxsize=1 << 12)
def _ranks(text: str) -> tuple[int, ...]:
    """Read a list of ranks, ``[0, 1, 2]``. Cached, since all ranks of a group repeat a list that may be very long."""
    return tuple(sorted(set(map(int, re.findall(r"\d+", text)))))
