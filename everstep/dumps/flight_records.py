"""Flight records of torch, with a rank's collectives, as JSON or, on request, as a pickle.

The same keys come from ``fr_trace_json`` and ``dump_nccl_trace_json`` of torch's worker control plane, from
``_dump_fr_trace_json`` and ``_dump_nccl_trace_json`` in a process, and in the files that ``TORCH_FR_DUMP_TEMP_FILE``
(or ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) names. Seen: gloo on torch 2.15; what NCCL alone fills is by torch's source.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from everstep.decisions.blame.hang.rank_samples import WORLD, CommunicationRecord, PendingOperation
from everstep.dumps.unreadable import UNREADABLE
from everstep.errors import DumpError

PICKLE = b"\x80"
"""First byte of a pickle."""
SAME_SIZES = ("all_reduce", "allreduce", "reduce_scatter", "_reduce_scatter_base", "broadcast")
"""Operations in which all ranks pass tensors of one size."""
ORDER = 64
"""Newest collectives of which it is kept in which order a rank entered them."""
_NO_RECORD: tuple[type[Exception], ...] = (*UNREADABLE, pickle.UnpicklingError)
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The contents of a rank's flight record."""

    record: CommunicationRecord
    groups: Mapping[str, tuple[int, ...]]
    """Process group → ranks, where the record has them."""
    labels: Mapping[str, str]
    """Process group → its description."""
    position: int
    """A number that grows with each operation, and so shows progress between two records."""


class _PlainData(pickle.Unpickler):
    """Takes numbers, text, lists and dicts from a pickle and nothing else: no class is loaded, no function called."""

    def find_class(self, module: str, name: str) -> Any:
        """Torch's records have none."""
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}, which is no plain data")


def parse_record(name: str, data: bytes, *, pickles: bool = False) -> dict[str, Any]:
    """The recorder's own dictionary.

    Args:
        name: Name of the file, for messages.
        data: Bytes of the file.
        pickles: Whether pickles may be read.

    Raises:
        DumpError: it is no flight record, or it is a pickle that may not be read.
    """
    try:
        if data[:1] == PICKLE:
            if not pickles:
                raise DumpError(
                    f"{name} is a pickle, as torch writes its records to files: with --pickles it is read, plain data "
                    "only; take pickles from people you trust, or dump JSON (fr_trace_json)"
                )
            found = _PlainData(io.BytesIO(data)).load()
        else:
            found = json.loads(data)
        if not isinstance(found.get("entries", []), list) or not {"entries", "pg_status", "pg_config"} & found.keys():
            raise ValueError("it has no entries")
    except _NO_RECORD as error:
        raise DumpError(f"{name} is no flight record of torch's ({error}): dump that rank again") from error
    return dict(found)


def flight_record(found: Mapping[str, Any], name: str = "the record") -> FlightRecord:
    """Read the recorder's dictionary.

    Raises:
        DumpError: an entry lacks a field.
    """
    last: dict[str, int] = {}
    labels: dict[str, str] = {}
    pending: dict[tuple[str, bool, int | None], PendingOperation] = {}
    position = -1
    order: deque[tuple[str, int]] = deque(maxlen=ORDER)
    try:
        groups = _groups(found.get("pg_config") or {})
        for entry in found.get("entries") or []:
            group, label = (*entry["process_group"], "")[:2]
            labels[group] = label
            position = max(position, int(entry.get("record_id", position + 1)))
            operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
            is_p2p, number, peer = bool(entry.get("is_p2p")), int(entry["collective_seq_id"]), None
            if is_p2p:
                operation, peer = _to_peer(operation, entry, groups.get(group))
            else:
                last[group] = max(last.get(group, -1), number)
                order.append((group, number))
            if not _is_done(entry) and (group, is_p2p, peer) not in pending:
                sizes = str(entry.get("input_sizes", "")) if operation.startswith(SAME_SIZES) else ""
                pending[group, is_p2p, peer] = PendingOperation(group, number, operation, sizes, peer, is_p2p)
    except UNREADABLE as error:
        raise DumpError(
            f"{name}: an entry of the flight record cannot be read ({error!r}; the record says that its version is "
            f"{found.get('version', 'not told')}): dump that rank again, or take the file away"
        ) from error
    record = CommunicationRecord(last, tuple(pending.values()), tuple(order))
    return FlightRecord(
        record, groups, {group: text for group, text in labels.items() if text != "undefined"}, position
    )


def _is_done(entry: Mapping[str, Any]) -> bool:
    """Gloo leaves the state as it was and says ``retired``; NCCL says both, the state later."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _to_peer(operation: str, entry: Mapping[str, Any], members: tuple[int, ...] | None) -> tuple[str, int | None]:
    """``send`` or ``recv`` of a p2p operation, and the peer's rank of the job; names have ranks of the group."""
    if (told := _P2P.match(operation)) is None:
        return operation, None
    other = int(told[3])
    if members is None:
        return told[1], other if entry["process_group"][0] == WORLD else None
    return told[1], members[other] if other < len(members) else None


def _groups(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Groups with their ranks; gloo's recorder leaves names or ranks empty: such say nothing."""
    found = {}
    for key, group in config.items():
        ranks = group.get("ranks", "") if isinstance(group, Mapping) else ""
        numbers = _ranks(ranks if isinstance(ranks, str) else str(ranks))
        if numbers and key:
            found[str(group.get("name") or key)] = numbers
    return found


@lru_cache(maxsize=1 << 12)
def _ranks(text: str) -> tuple[int, ...]:
    """``[0, 1, 2]``. All ranks of a group have the same text, which may name ten thousand."""
    return tuple(sorted(map(int, re.findall(r"\d+", text))))
