"""The same script under torchrun, its knobs set in its favour."""

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
"""A peer that has not stepped again by then counts as failed."""
LOOK_S = 0.05
INTERRUPTED = threading.Event()
"""Set when the benchmark is to end: peers are waited for in a thread, which Ctrl-C does not reach."""


class PeerFailed(EverstepError):
    """The peer did not run, or did not recover."""


def last_words(output: Path) -> str:
    """Why a process ended: the last line that it wrote, before what its destructors said of unfinished objects."""
    told = output.read_text(errors="replace").partition("Exception ignored in")[0]
    lines = told.strip().splitlines()
    return lines[-1] if lines else "nothing"


def recover(folder: Path, script: Path, args: Sequence[str], *, ranks: int, rank: int, at_step: int) -> Recovery:
    """Kill one rank of a torchrun job in the middle of a step; wait until all ranks have completed a step again.

    The script has no checkpoint outside everstep: torchrun starts it from the
    beginning, and the time ends with the first completed step of all ranks.

    Raises:
        PeerFailed: it did not come to the fault, or not back.
    """
    plan = write_plan(folder, rank, at_step)
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "100", "--monitor-interval", "0.1", "--standalone"]
    command += [str(Path(step_log.__file__).resolve()), str(folder), str(script), *args]
    with peer_process(command, folder, {environment.FAULTS: str(plan)}) as alive:
        fault_ns = wait_for(lambda: fault_time(plan), alive, "the fault", folder)
        stepped = wait_for(lambda: all_of(folder, range(ranks), "step"), alive, "the step after it", folder)
        started, imported = (all_of(folder, range(ranks), event) for event in ("started", "imported"))
    total_s = (stepped - fault_ns) / 1e9
    marks = [("detect, stop and start", started), ("import of torch", imported), ("script to next step", stepped)]
    parts = parts_between(total_s, fault_ns, marks)
    del parts[UNACCOUNTED]
    return Recovery(rank, at_step, total_s, parts)


def write_plan(folder: Path, rank: int, at_step: int) -> Path:
    """A plan with one SIGKILL, as everstep's own ranks meet it."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps([{"id": "kill", "fault": "kill-rank", "rank": rank, "at_step": at_step}]))
    return plan


def fault_time(plan: Path) -> int:
    """When the fault fired, ns; 0: not yet."""
    found = faults.fired(plan, {"id": "kill"})
    return int(found["time_ns"]) if found else 0


def all_of(folder: Path, ranks: Sequence[int], event: str, attempt: int = 1) -> int:
    """When the last of the ranks had an event, ns; 0: one of them has not had it yet."""
    times = [step_log.first(folder, rank, attempt, event) for rank in ranks]
    return max(times) if all(times) else 0


def wait_for(value: Callable[[], int], alive: Callable[[], bool], what: str, folder: Path) -> int:
    """Wait for a time to be known.

    Raises:
        PeerFailed: the peer ended, or it took too long.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (found := value()):
        if INTERRUPTED.is_set():
            raise PeerFailed(f"{what} did not come: the benchmark was interrupted")
        if not alive() or time.monotonic() > deadline:
            why = "it ended" if not alive() else f"not within {LIMIT_S:.0f} s"
            raise PeerFailed(f"{what} did not come: {why}; see {folder}/output")
        time.sleep(LOOK_S)
    return found


@contextmanager
def peer_process(command: Sequence[str], folder: Path, env: dict[str, str]) -> Iterator[Callable[[], bool]]:
    """A process in a session of its own, ended with all that it started; yields whether it lives."""
    process = start_peer(command, folder, env)
    try:
        yield lambda: process.poll() is None
    finally:
        end_tree(process)


def start_peer(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; what it says goes to ``output`` in the folder."""
    given: dict[str, Any] = dict(os.environ) | {
        "OMP_NUM_THREADS": "1",
        # Without it, half of the restarts on gloo meet keys of the run before and hang (pytorch #135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **env,
    }
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=given, stdout=output, stderr=output, start_new_session=True)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything below it, whatever sessions they made."""
    import psutil

    try:
        root = psutil.Process(process.pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        found = []
    for one in found:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=10)
    process.wait()
