"""Reads the flight record of a rank from torch's control server, whose threads answer without Python's lock.

The server runs in every rank, because it is started before the script (``agent/launcher/rank_process.py``).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.errors import CannotInspect

HANDLERS = ("fr_trace_json", "fr_trace_json?backend=nccl2", "dump_nccl_trace_json")
"""Requests for a record; they are sent in this order until a record has entries. The last is for NCCL alone."""
KEPT = 256
"""The number of newest entries that are kept. The newest entry of each group, and all entries that are not completed,
are kept as well."""
FIELDS = (
    "record_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "state",
    "retired",
    "time_created_ns",
)
MOST_BYTES = 64 << 20
"""The largest answer that is accepted, bytes."""


def flight_record(path: Path, limit_s: float) -> bytes:
    """Return a rank's flight record, cut to the parts that an analysis needs, as JSON.

    Args:
        path: Socket of the rank's server.
        limit_s: Time limit for each request, seconds: a stopped process accepts requests and never answers.

    Raises:
        CannotInspect: the server does not answer, or has no record.
    """
    for handler in HANDLERS:
        record: Any = None
        with suppress(ValueError, RecursionError):
            record = json.loads(_ask(path, handler, limit_s))
        if _has_entries(record):
            return json.dumps(cut(record), separators=(",", ":")).encode()
    raise CannotInspect("the rank has no record of collectives")


def _has_entries(found: Any) -> bool:
    """Return whether an answer is a record with entries."""
    entries = found.get("entries") if isinstance(found, dict) else None
    return isinstance(entries, list) and bool(entries) and all(isinstance(entry, dict) for entry in entries)


def cut(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the entries and fields that do not show the position of a rank."""
    entries: Sequence[Mapping[str, Any]] = found["entries"]
    newest: dict[str, int] = {}
    for at, entry in enumerate(entries):
        newest[str(entry.get("process_group"))] = at
    wanted = {*range(max(len(entries) - KEPT, 0), len(entries)), *newest.values()}
    wanted |= {
        at for at, entry in enumerate(entries) if not (entry.get("retired") or entry.get("state") == "completed")
    }
    kept = [{name: entries[at][name] for name in FIELDS if name in entries[at]} for at in sorted(wanted)]
    return {name: found[name] for name in ("version", "pg_config", "pg_status") if name in found} | {"entries": kept}


def _ask(path: Path, handler: str, limit_s: float) -> bytes:
    """Return the body of an answer."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(limit_s)
            connection.connect(str(path))
            connection.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            answer = bytearray()
            while piece := connection.recv(1 << 16):
                answer += piece
                if len(answer) > MOST_BYTES:
                    raise CannotInspect(f"the record has more than {MOST_BYTES >> 20} MB")
    except FileNotFoundError as error:
        raise CannotInspect("the rank has no control server") from error
    except OSError as error:
        raise CannotInspect(f"the control server does not answer: {error.strerror or error}") from error
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError("the server does not have this handler")
    return body
