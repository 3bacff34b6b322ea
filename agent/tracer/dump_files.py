"""This module selects ranks of a whole sample, and converts it to files of a dump for ``everstep.dumps.folder``."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator

from agent.v1 import agent_pb2 as pb
from everstep.dumps.folder import PROCESSES


def of_ranks(whole: pb.StacksReply, ranks: Collection[int] = ()) -> pb.StacksReply:
    """Return a whole sample with only these ranks; empty: all ranks."""
    return pb.StacksReply(
        machine=whole.machine,
        generation=whole.generation,
        time_ns=whole.time_ns,
        processes=[process for process in whole.processes if not ranks or process.rank in ranks],
        records=[record for record in whole.records if not ranks or record.rank in ranks],
    )


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
