"""Measures how long it takes to find the machines at fault from the stacks of thousands of ranks that hang.

Each rank has four stacks of about 30 frames, as py-spy prints them in JSON: its own, those of two data loaders, and
that of a process that saves checkpoints. One pipeline of the job hangs, and line numbers differ between ranks as in
real dumps. The measured time begins with the bytes of the dumps and ends with the verdict. There are two comparisons.
In the first, the same stacks are put into a plain trie of frames, which names no machine. In the second, everstep and
torch's own analyzer read flight records of as many ranks; torch's analyzer lists the ranks that are missing in each
collective.

    python -P -m benchmarks.aggregate
    python -P -m benchmarks.aggregate --quick --json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.aggregate_records import by_everstep, by_torch
from benchmarks.common import Row, finish, say, show, show_json
from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.dumps.folder import FolderReader
from everstep.dumps.py_spy import StackReader
from everstep.model.hang import HangConclusion
from everstep.model.topology import Topology

TIME_AIM_S, MEMORY_AIM_MB = 1.0, 200.0
LARGEST = 10_240
SIZES = (1_024, 2_048, 5_120, LARGEST, 20_480)
TP, PP, PER_MACHINE = 8, 8, 8
VARIANTS = 40
"""Number of variants of each kind of stack. Their line numbers differ, as between micro-batches and layers of ranks."""
FRAMES = 30
MOST_OF_TORCH = 1_024
"""The largest number of flight records that torch's analyzer gets: with 10,240 it had not ended after five minutes."""


def topology_of(ranks: int) -> Topology:
    """Return a topology with 8 ranks (tp 8) on each machine, and pipelines of 8 stages."""
    return Topology.of(ranks // PER_MACHINE, PER_MACHINE, tp=TP, pp=PP)


class Dumps:
    """The dumps that py-spy makes of a job in which one pipeline hangs, for four processes of each rank."""

    def __init__(self, topology: Topology) -> None:
        self.topology, self._draw = topology, random.Random(11)
        self.hung = set(topology.along(topology.world_size // 3, ["pp", "tp"]))
        dist = "torch/distributed/distributed_c10d.py"
        saver = "torch/distributed/checkpoint/_async_process_executor.py"
        self._kinds = {
            "sync": self._variants("all_reduce", dist, "allreduce_gradients"),
            "recv": self._variants("irecv", dist, "recv_backward"),
            "gather": self._variants("all_gather_into_tensor", dist, "backward_step"),
            "loader": self._variants("select", "selectors.py", "_worker_loop", "torch/utils/data/_utils/worker.py"),
            "saver": self._variants("select", "selectors.py", "run", saver),
        }

    def _variants(self, leaf: str, file: str, own: str, own_file: str = "megatron/schedules.py") -> list[bytes]:
        found = []
        for _ in range(VARIANTS):
            lines = [(leaf, file), ("wrapper", "torch/distributed/c10d_logger.py"), (own, own_file)]
            lines += [(f"layer_{n}", f"megatron/core/module_{n % 7}.py") for n in range(FRAMES - len(lines))]
            frames = [
                {
                    "name": name,
                    "filename": f"/opt/venv/lib/python3.11/site-packages/{path}",
                    "module": None,
                    "short_filename": path,
                    "line": self._draw.randint(1, 4000),
                    "locals": None,
                    "is_entry": False,
                    "is_shim_entry": False,
                }
                for name, path in lines
            ]
            found.append(json.dumps(frames, separators=(",", ":")).encode())
        return found

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the bytes of each process's dump."""
        last = PP - 1
        for rank in range(self.topology.world_size):
            coordinate = self.topology.coordinate(rank)
            own = "sync" if rank not in self.hung else "gather" if coordinate.pp == last else "recv"
            for number, kind in enumerate((own, "loader", "loader", "saver")):
                pid = rank * 8 + number
                yield (
                    f"rank-{rank}-{number}.json",
                    (
                        b'[{"pid":%d,"thread_id":%d,"thread_name":"MainThread","os_thread_id":%d,"active":false,'
                        b'"owns_gil":false,"frames":%b,"process_info":null}]'
                        % (pid, pid * 4096, pid, self._draw.choice(self._kinds[kind]))
                    ),
                )


def analyze(topology: Topology) -> tuple[float, int]:
    """Return the CPU seconds from the bytes to the verdict, and the number of bytes.

    Raises:
        AssertionError: the verdict names other machines.
    """
    dumps = Dumps(topology)
    reader, size, seconds = FolderReader(StackReader()), 0, 0.0
    for name, data in dumps.files():
        size += len(data)
        began = time.process_time()
        reader.read([(name, data)])
        seconds += time.process_time() - began
    began = time.process_time()
    verdict = judge_hang(replace(reader.samples(), is_hung=True), topology)
    seconds += time.process_time() - began
    machines = tuple(sorted({topology.machine(rank) for rank in dumps.hung}))
    if (verdict.conclusion, verdict.machines) != (HangConclusion.OVER_EVICTS, machines):
        raise AssertionError(f"{verdict.conclusion}: {verdict.reason}")
    return seconds, size


def trie(topology: Topology) -> tuple[float, int]:
    """Return the CPU seconds that put the same stacks into a trie of frames with ranks at its nodes, and the bytes."""
    root: dict[Any, Any] = {}
    seconds, size = 0.0, 0
    for name, data in Dumps(topology).files():
        size += len(data)
        began = time.process_time()
        rank = int(name.split("-")[1])
        for thread in json.loads(data):
            node = root
            for frame in reversed(thread["frames"]):
                node = node.setdefault((frame["name"], frame["short_filename"]), {})
            node.setdefault("ranks", set()).add(rank)
        seconds += time.process_time() - began
    return seconds, size


def measured(side: str, ranks: int) -> tuple[float, float, float]:
    """Return the CPU seconds, MB of memory, and MB of dumps, measured in a separate process."""
    say(f"{side}, {ranks} ranks")
    command = [sys.executable, "-P", "-m", "benchmarks.aggregate", "--one", side, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, memory, size = map(float, done.stdout.split())
    return seconds, memory, size


def measure_side(name: str, ranks: int) -> None:
    """Measure one side, and print the figures that ``measured`` reads."""
    side = SIDES[name]
    side(topology_of(1_024))  # so that imports and other one-time work do not count
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, size = side(topology_of(ranks))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(seconds, (after - before) / 1e3, size / 1e6)


SIDES = {"stacks": analyze, "trie": trie, "records": by_everstep, "torch": by_torch}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="leave out 20,480 ranks, and use only 1,024 flight records"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_side(options.one[0], int(options.one[1]))
        return
    rows: list[Row] = []
    failures: list[str] = []
    for ranks in SIZES[:-1] if options.quick else SIZES:
        seconds, memory, size = measured("stacks", ranks)
        plain, _, _ = measured("trie", ranks)
        aims = (TIME_AIM_S, MEMORY_AIM_MB) if ranks == LARGEST else (None, None)
        rows.append(Row(f"{ranks} ranks, {size:.0f} MB of dumps; peer: a trie", "s", seconds, plain, aims[0], "ours"))
        rows.append(Row(f"{ranks} ranks, memory for it", "MB", memory, None, aims[1], "ours"))
    for ranks in SIZES[:1] if options.quick else (SIZES[0], LARGEST):
        seconds, _, size = measured("records", ranks)
        peer = None
        if ranks <= MOST_OF_TORCH:
            try:
                peer, _, _ = measured("torch", ranks)
            except subprocess.CalledProcessError as error:
                failures.append(f"torch's analyzer with {ranks} ranks: {error.stderr.strip()[-300:]}")
        rows.append(Row(f"{ranks} flight records, {size:.0f} MB; peer: torch's analyzer", "s", seconds, peer))
    if options.json:
        show_json("aggregate", rows)
    else:
        show("aggregate", rows)
    finish(failures)


if __name__ == "__main__":
    main()
