"""Record the corpora in ``tests/data/hangs``: real jobs on gloo, dumped by py-spy and by torch's flight recorder.

Run this file again for a new version of torch: ``python -P -m tests.everstep.decisions.blame.hang.record_stacks
[NAME…]``. It needs py-spy. On two cores, a job of 16 ranks takes some seconds.
"""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main

from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang import recorded_job
from tests.everstep.decisions.blame.hang.recorded_job import ALL, HEALTHY, Fault

ROOT = Path(__file__).resolve().parents[5]
INTO = ROOT / "tests" / "data" / "hangs"
HUNG_S, LIMIT_S = 2.0, 120.0
ENDING = 4095
"""The byte after the steps of ranks. It is set when all ranks are killed, so that no rank prints a lost connection."""


@dataclass(frozen=True)
class Recording:
    """A job to record, and its fault."""

    topology: Topology
    fault: Fault = HEALTHY
    evaluate_every: int = 0
    looks: int = 2
    """The number of samples."""
    files: bool = False
    """Record no stacks, but only the flight records that torch writes to files as pickles."""


EIGHT = Topology.of(4, 2, tp=2, pp=2)
SIXTEEN = Topology.of(8, 2, tp=2, pp=4)
RECORDINGS = {
    "healthy": Recording(EIGHT),
    "healthy-pp4": Recording(SIXTEEN),
    "evaluation": Recording(EIGHT, evaluate_every=1),
    "stop": Recording(EIGHT, Fault("stop", 3, 6)),
    "deadlock": Recording(SIXTEEN, Fault("deadlock", 9, 4)),
    "skip": Recording(EIGHT, Fault("skip", 5, 5)),
    "loader": Recording(EIGHT, Fault("loader", 2, 6)),
    "gil": Recording(EIGHT, Fault("gil", 6, 5)),
    "spin": Recording(EIGHT, Fault("spin", 1, 5)),
    "order": Recording(EIGHT, Fault("order", ALL, 5)),
    "flight-records-16": Recording(Topology.of(8, 2, tp=4), Fault("deadlock", 9, 4), looks=1, files=True),
    "flight-records-pp4": Recording(SIXTEEN, Fault("deadlock", 9, 4), looks=1, files=True),
}


def record(name: str, recording: Recording) -> None:
    """Run a job until it hangs, record it, and end it."""
    world = recording.topology.world_size
    with tempfile.TemporaryDirectory() as folder, running(recording, Path(folder)) as (pids, done):
        wait_until_it_hangs(recording, done, world)
        target = Path(folder) / "out"
        for look in range(1, recording.looks + 1):
            where = target / f"snapshot-{look}" if recording.looks > 1 else target
            where.mkdir(parents=True)
            if recording.files:
                files(Path(folder), where, world)
            else:
                dump(pids, Path(folder), where)
            time.sleep(1.0)
        for path in target.rglob("*"):
            if path.is_file():
                path.write_bytes(without_own_paths(path.read_bytes()))
        about = {"torch": torch.__version__, "topology": str(recording.topology), "fault": vars(recording.fault)}
        pack(INTO / f"{name}.tar.xz", target, about)
    print(name, (INTO / f"{name}.tar.xz").stat().st_size, "bytes", flush=True)


def wait_until_it_hangs(recording: Recording, done: Any, world: int) -> None:
    deadline, since, last = time.monotonic() + LIMIT_S, time.monotonic(), b""
    while time.monotonic() < deadline:
        now = bytes(done[:world])
        if now != last:
            last, since = now, time.monotonic()
        if recording.fault.kind == "" and min(now) >= 5:
            return
        if recording.fault.kind and min(now) >= 1 and time.monotonic() - since > HUNG_S:
            return
        time.sleep(0.05)
    raise SystemExit(f"the job does not reach its fault: steps {list(last)}")


@contextmanager
def running(recording: Recording, folder: Path) -> Iterator[tuple[list[int], Any]]:
    """Fork the store and the ranks; yield the processes of the ranks, and a map with the step of each rank."""
    done = mmap.mmap(-1, 4096)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    gc.collect()
    gc.freeze()
    world = recording.topology.world_size
    server = fork(lambda: serve(port, world), done)
    time.sleep(0.3)
    pids = [fork(lambda rank=rank: rank_main(recording, folder, port, rank, done), done) for rank in range(world)]
    try:
        yield pids, done
    finally:
        done[ENDING] = 1
        for pid in [*pids, server]:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork(what: Any, done: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        what()
    except BaseException:
        if not done[ENDING]:
            traceback.print_exc()
    finally:
        os._exit(1)


def serve(port: int, world: int) -> None:
    held = store(port, world, is_master=True)
    while held:
        time.sleep(10)


def store(port: int, world: int, *, is_master: bool = False) -> Any:
    limit = timedelta(minutes=5)
    return dist.TCPStore("127.0.0.1", port, world, is_master=is_master, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]


def rank_main(recording: Recording, folder: Path, port: int, rank: int, done: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "TORCH_FR_BUFFER_SIZE": "96",
    }
    if recording.files:
        start_writer(folder, rank)
    with control_plane(folder / f"server-{rank}"):
        client = store(port, recording.topology.world_size)
        recorded_job.main(rank, recording.topology, client, recording.fault, recording.evaluate_every, done)


@contextmanager
def control_plane(path: Path) -> Iterator[None]:
    """Run torch's server of flight records for this rank."""
    os.environ["TORCH_WORKER_SERVER_SOCKET"] = str(path)
    served = worker_main()
    assert served is not None
    with served:
        yield


def start_writer(folder: Path, rank: int) -> None:
    """Start a thread that writes the flight record, as torch's watchdog does, once the file ``now`` exists."""
    import threading

    def write() -> None:
        while not (folder / "now").exists():
            time.sleep(0.05)
        record = torch._C._distributed_c10d._dump_fr_trace()
        (folder / f"part-{rank}").write_bytes(record)
        (folder / f"part-{rank}").rename(folder / f"comm_lib_trace_rank_{rank}")

    threading.Thread(target=write, daemon=True).start()


def files(folder: Path, where: Path, world: int) -> None:
    (folder / "now").touch()
    names = [f"comm_lib_trace_rank_{rank}" for rank in range(world)]
    deadline = time.monotonic() + LIMIT_S
    while not all((folder / name).exists() for name in names):
        if time.monotonic() > deadline:
            raise SystemExit("a rank did not write its flight record")
        time.sleep(0.05)
    for name in names:
        (folder / name).rename(where / name)


def dump(pids: list[int], folder: Path, where: Path) -> None:
    """Write the stacks and states of all processes, and the flight record of each rank that answers."""
    processes = []
    for rank, pid in enumerate(pids):
        children = psutil.Process(pid).children(recursive=True)
        for number, process in enumerate([psutil.Process(pid), *children]):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            processes.append({"pid": process.pid, "rank": rank, "state": state})
            name = f"rank-{rank}.json" if number == 0 else f"rank-{rank}-child-{number}.json"
            (where / name).write_bytes(py_spy(process.pid))
    for rank in range(len(pids)):
        if record := flight_record(folder / f"server-{rank}"):
            (where / f"flight-record-rank-{rank}.json").write_bytes(record)
    (where / "processes.json").write_text(json.dumps(processes))


def py_spy(pid: int) -> bytes:
    program = Path(sys.executable).with_name("py-spy")
    command = [str(program), "dump", "--json", "--pid", str(pid)]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:  # a stopped process cannot be paused
        found = subprocess.run([*command, "--nonblocking"], capture_output=True, check=True)
    return found.stdout


def flight_record(path: Path) -> bytes:
    """Return the record from torch's worker control plane, or nothing if the rank does not answer."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(3)
        try:
            client.connect(str(path))
            client.sendall(b"POST /handler/fr_trace_json HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
            answer = b""
            while piece := client.recv(1 << 16):
                answer += piece
        except OSError:
            return b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return body if b" 200 " in head.split(b"\r\n")[0] else b""


def without_own_paths(data: bytes) -> bytes:
    """Replace the folders of this computer by texts of the same length, since pickles contain the lengths of texts."""
    for path in (str(ROOT), sys.base_prefix, str(Path(sys.argv[0]).parent)):
        data = data.replace(path.encode(), b"/job".ljust(len(path), b"_"))
    return data


def pack(path: Path, folder: Path, about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (folder / ".about.json").write_text(json.dumps(about))
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                data = file.read_bytes()
                entry = tarfile.TarInfo(str(file.relative_to(folder)))
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    for name in sys.argv[1:] or list(RECORDINGS):
        record(name, RECORDINGS[name])
    os._exit(0)
