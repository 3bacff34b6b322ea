"""This module converts an agent's sample of ranks to the files of a dump, which ``everstep.dumps.folder`` reads."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

from agent.v1 import agent_pb2 as pb
from everstep.dumps.folder import PROCESSES


def files_of(reply: pb.StacksReply) -> Iterator[tuple[str, bytes]]:
    """Yield the relative path and the contents of each file of the dump; the list of processes comes first.

    There is no file for data that an agent left out, or that cannot be unpacked.
    """
    listing = [
        {
            "pid": process.pid,
            "rank": process.rank,
            "role": process.role,
            "state": process.state,
            "blocked_in": process.blocked_in,
            "name": process.name,
        }
        for process in reply.processes
    ]
    yield f"{reply.machine}/{PROCESSES}", json.dumps(listing).encode()
    for process in reply.processes:
        if stacks := unpacked(process.stacks):
            yield f"{reply.machine}/rank-{process.rank}/{process.pid}.json", stacks
    for record in reply.records:
        if contents := unpacked(record.record):
            yield f"{reply.machine}/rank-{record.rank}/flight-record.json", contents


def unpacked(data: bytes) -> bytes:
    """Unpack data that an agent compressed; empty if it cannot be unpacked."""
    try:
        return gzip.decompress(data) if data else b""
    except (OSError, EOFError, zlib.error):
        return b""
