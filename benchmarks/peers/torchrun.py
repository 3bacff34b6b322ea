"""Measures a recovery under torchrun, with the fastest settings; also starts, watches and ends processes of peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers import step_log
from benchmarks.timeline import UNACCOUNTED, Recovery, parts_between
from everstep.errors import EverstepError
from everstep.rank import drill_faults as faults
from everstep.rank import environment

LIMIT_S = 180.0
"""A peer that does not reach an event within this time counts as failed, seconds."""
POLL_S = 0.05
INTERRUPTED = threading.Event()
"""Set when the benchmark is interrupted: a thread waits for peers, and Ctrl-C does not reach that thread."""


class PeerFailed(EverstepError):
    """A peer did not run, or did not recover."""


def last_words(output: Path) -> str:
    """Return the last line that a process wrote, without the later errors of destructors."""
    text = output.read_text(errors="replace").partition("Exception ignored in")[0]
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


def recover(folder: Path, script: Path, args: Sequence[str], *, ranks: int, rank: int, at_step: int) -> Recovery:
    """Kill one rank of a torchrun job in the middle of a step, and wait until all ranks have completed a step again.

    Without everstep the script has no checkpoint, so torchrun starts it from the beginning.

    Raises:
        PeerFailed: the job did not reach the fault, or did not step after it.
    """
    plan = write_plan(folder, rank, at_step)
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "100", "--monitor-interval", "0.1", "--standalone"]
    command += [str(Path(step_log.__file__).resolve()), str(folder), str(script), *args]
    with peer_process(command, folder, {environment.FAULTS: str(plan)}) as alive:
        fault_ns = wait_for(lambda: fault_time(plan), alive, "the fault", folder)
        stepped = wait_for(lambda: all_of(folder, range(ranks), "step"), alive, "a step after the fault", folder)
        started, imported = (all_of(folder, range(ranks), event) for event in ("started", "imported"))
    total_s = (stepped - fault_ns) / 1e9
    marks = [("detect, stop and start", started), ("import of torch", imported), ("script to next step", stepped)]
    parts = parts_between(total_s, fault_ns, marks)
    del parts[UNACCOUNTED]
    return Recovery(rank, at_step, total_s, parts)


def write_plan(folder: Path, rank: int, at_step: int) -> Path:
    """Write a plan with one SIGKILL, as for ranks under everstep; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps([{"id": "kill", "fault": "kill-rank", "rank": rank, "at_step": at_step}]))
    return plan


def fault_time(plan: Path) -> int:
    """Return the time at which the fault fired, nanoseconds; 0: it has not."""
    mark = faults.fired(plan, {"id": "kill"})
    return int(mark["time_ns"]) if mark else 0


def all_of(folder: Path, ranks: Sequence[int], event: str, attempt: int = 1) -> int:
    """Return the time at which the last of the ranks had an event, nanoseconds; 0: one of them has not had it yet."""
    times = [step_log.first(folder, rank, attempt, event) for rank in ranks]
    return max(times) if all(times) else 0


def wait_for(value: Callable[[], int], alive: Callable[[], bool], event: str, folder: Path) -> int:
    """Wait until the time of an event is known, and return it.

    Raises:
        PeerFailed: the peer ended, or it took too long.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (found := value()):
        if INTERRUPTED.is_set():
            raise PeerFailed(f"{event} was not reached: the benchmark was interrupted")
        if not alive() or time.monotonic() > deadline:
            why = "the peer ended" if not alive() else f"not within {LIMIT_S:.0f} s"
            raise PeerFailed(f"{event} was not reached: {why}; see {folder}/output")
        time.sleep(POLL_S)
    return found


@contextmanager
def peer_process(command: Sequence[str], folder: Path, env: dict[str, str]) -> Iterator[Callable[[], bool]]:
    """Run a process while the block runs, and then end it with all its children; yield a function that returns whether
    it is alive."""
    process = start_peer(command, folder, env)
    try:
        yield lambda: process.poll() is None
    finally:
        end_tree(process)


def start_peer(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; its output goes to the file ``output`` in the folder."""
    environ: dict[str, Any] = dict(os.environ) | {
        "OMP_NUM_THREADS": "1",
        # Without this, half of the restarts on gloo find keys of the previous run and hang (pytorch #135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **env,
    }
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants, also those in other sessions."""
    import psutil

    try:
        root = psutil.Process(process.pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for member in processes:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
    process.wait()
