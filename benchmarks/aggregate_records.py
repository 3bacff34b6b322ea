"""Makes flight records of thousands of ranks, and analyzes them by everstep and by torch's analyzer (``torchfrtrace``).

``benchmarks/aggregate.py`` measures both. The records have the form of NCCL's flight records. Each lists the members of
its rank's groups, and the rank's last operations in its tensor-parallel, data-parallel and world group. One rank has
not entered its last tensor-parallel collective, and the other ranks wait. ``benchmarks/aggregate_looks.py`` has longer
records of the same kind.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Sequence
from typing import Any

from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.dumps.folder import FolderReader
from everstep.dumps.py_spy import StackReader
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology

STEPS = 4
"""Number of rounds of collectives in a record."""


class FlightRecords:
    """The flight records of all ranks of a job.

    Args:
        topology: The topology of the job.
        kinds: The kinds of groups in which each rank calls collectives, in order; the last call is in the world group.
        steps: The number of rounds of collectives in a record.
    """

    def __init__(self, topology: Topology, kinds: Sequence[str] = ("tp", "dp"), steps: int = STEPS) -> None:
        self.topology, self.kinds, self.steps = topology, kinds, steps
        self.culprit = topology.world_size // 3
        """The rank for which all other ranks wait."""
        self._world = tuple(range(topology.world_size))
        self._names: dict[tuple[int, ...], str] = {self._world: "0"}
        self._lacks = {self.culprit: len(kinds) + 1}
        """Rank → the number of its last calls that it did not make, because it waits in an earlier call."""
        for number, kind in enumerate(kinds):
            waits = self._lacks.keys() | set[int]()
            for ranks in topology.groups(kind):
                self._names[ranks] = str(len(self._names))
                if not waits.isdisjoint(ranks):
                    self._lacks = dict.fromkeys(ranks, len(kinds) - number) | self._lacks

    def of(self, rank: int) -> dict[str, Any]:
        """Return the flight record of a rank."""
        own = [*(self.topology.group(rank, kind) for kind in self.kinds), self._world]
        calls = [(group, step) for step in range(1, self.steps + 1) for group in own]
        calls = calls[: len(calls) - self._lacks.get(rank, 0)]
        last = len(calls) - 1
        names = self._names
        entries = [_entry(number, names[group], step, number < last) for number, (group, step) in enumerate(calls)]
        if rank == self.culprit:
            entries[-1] |= {"retired": True, "state": "completed"}
        config = {names[group]: {"name": names[group], "desc": "group", "ranks": str(list(group))} for group in own}
        return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def records(topology: Topology) -> tuple[list[bytes], int]:
    """Return the flight record of each rank as JSON, and the rank for which all other ranks wait."""
    every = FlightRecords(topology)
    return [json.dumps(every.of(rank)).encode() for rank in range(topology.world_size)], every.culprit


def _entry(number: int, group: str, step: int, done: bool) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": [group, "group"],
        "collective_seq_id": step,
        "p2p_seq_id": 0,
        "op_id": step,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "retired": done,
        "time_created_ns": number,
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 1}],
    }


def by_everstep(topology: Topology) -> tuple[float, int]:
    """Return the CPU seconds from the bytes to the verdict, and the number of bytes.

    Raises:
        AssertionError: the verdict names another rank.
    """
    found, culprit = records(topology)
    began = time.process_time()
    reader = FolderReader(StackReader())
    reader.read((f"rank-{rank}", data) for rank, data in enumerate(found))
    verdict = judge_hang(reader.samples(), topology)
    seconds = time.process_time() - began
    if (verdict.conclusion, verdict.ranks) != (HangConclusion.NAMES, (culprit,)):
        raise AssertionError(f"{verdict.conclusion}: {verdict.reason}")
    return seconds, sum(map(len, found))


def by_torch(topology: Topology) -> tuple[float, int]:
    """Return the CPU seconds of torch's analyzer from the bytes to its tables, and the number of bytes.

    Raises:
        AssertionError: the analyzer does not report the rank as missing.
    """
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    options = JobConfig().parse_args([])
    options.allow_incomplete_ranks = True
    found, culprit = records(topology)
    log = io.StringIO()
    began = time.process_time()
    details = {
        f"rank{rank}": {"rank": rank, "host_name": f"host{rank}", **json.loads(data)} for rank, data in enumerate(found)
    }
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), _logged_into(log):
        build_db(details, options, "2.10")
    seconds = time.process_time() - began
    if f"{{{culprit}}}" not in log.getvalue():
        raise AssertionError(f"torch's analyzer does not report rank {culprit} as missing: {log.getvalue()[-500:]}")
    return seconds, sum(map(len, found))


@contextlib.contextmanager
def _logged_into(log: io.StringIO) -> Any:
    """Send the analyzer's log to a text instead of the terminal."""
    import logging

    handler = logging.StreamHandler(log)
    root = logging.getLogger()
    named = [logger for name in logging.root.manager.loggerDict if (logger := logging.getLogger(name)).handlers]
    before = [(logger, list(logger.handlers)) for logger in (root, *named)]
    for logger, handlers in before:
        logger.handlers = [handler if isinstance(own, logging.StreamHandler) else own for own in handlers]
    try:
        yield
    finally:
        for logger, handlers in before:
            logger.handlers = handlers
