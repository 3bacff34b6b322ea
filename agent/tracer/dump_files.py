"""What an agent saw of ranks, as the files of a look that ``everstep.dumps.folder`` reads."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

from agent.v1 import agent_pb2 as pb
from everstep.dumps.folder import PROCESSES


def files_of(reply: pb.StacksReply) -> Iterator[tuple[str, bytes]]:
    """Names below the folder of a look, and contents; who the processes are comes first.

    What an agent left out, or cannot be unpacked, is no file.
    """
    said = [
        {"pid": process.pid, "rank": process.rank, "role": process.role, "state": process.state, "name": process.name}
        for process in reply.processes
    ]
    yield f"{reply.machine}/{PROCESSES}", json.dumps(said).encode()
    for process in reply.processes:
        if found := unpacked(process.stacks):
            yield f"{reply.machine}/rank-{process.rank}/{process.pid}.json", found
    for record in reply.records:
        if found := unpacked(record.record):
            yield f"{reply.machine}/rank-{record.rank}/flight-record.json", found


def unpacked(data: bytes) -> bytes:
    """What an agent compressed; nothing where it cannot be unpacked."""
    try:
        return gzip.decompress(data) if data else b""
    except (OSError, EOFError, zlib.error):
        return b""
