"""The watch over rank processes: copies of a rank, remaining processes, and times without a look."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from drills.observe.processes import CopyWatch, Tree, await_rank_of
from everstep.errors import TreeUnknown
from everstep.system.procfs import children

RANK = """
import os, sys, time
os.setsid()
open("/proc/self/comm", "w").write(sys.argv[1])
print("up", flush=True)
time.sleep(60)
"""


@contextmanager
def process(name: str, output: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process with a name. Its errors go to a file, as those of a rank do."""
    with output.open("a") if output else nullcontext() as errors:
        started = subprocess.Popen([sys.executable, "-c", RANK, name], stdout=subprocess.PIPE, stderr=errors, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def watched(seconds: float) -> CopyWatch:
    watch = CopyWatch(Tree(os.getpid()))
    watch.start()
    time.sleep(seconds)
    watch.stop()
    assert watch.samples > 0
    return watch


def test_two_copies_of_a_rank_are_seen() -> None:
    with process("everstep r3") as one, process("everstep r3") as other, process("everstep r4"):
        [seen] = watched(1.0).copies
        assert (seen.rank, set(seen.pids)) == (3, {one.pid, other.pid})


def test_different_ranks_are_no_copies_and_other_programs_do_not_count() -> None:
    with process("everstep r3"), process("everstep r31"), process("else r3"):
        assert watched(0.5).copies == set()


def of_job(folder: Path, job: str, machine: str) -> Path:
    place = folder / "machines" / machine / "jobs" / job
    place.mkdir(parents=True)
    return place / "log"


def test_ranks_of_two_jobs_are_no_copies_and_share_no_machine(tmp_path: Path) -> None:
    gpt, bert, more = (of_job(tmp_path, *place) for place in (("gpt", "m1"), ("bert", "m2"), ("bert", "m1")))
    with process("everstep r0", gpt), process("everstep r0", bert):
        watch = watched(1.0)
        assert (watch.copies, watch.shared) == (set(), set())
        with process("everstep r1", more):
            assert watched(1.0).shared == {("m1", ("bert", "gpt"))}
        with process("everstep r0", more):
            [seen] = watched(1.0).copies
    assert (seen.job, seen.rank, set(seen.machines)) == ("bert", 0, {"m1", "m2"})


def test_an_unreadable_process_tree_is_not_an_empty_one() -> None:
    for tree in (Tree(0), Tree(1 << 30)):
        with pytest.raises(TreeUnknown):
            tree.processes()
        with pytest.raises(TreeUnknown):
            tree.left_of_jobs()
        watch = CopyWatch(tree)
        watch.start()
        time.sleep(0.3)
        watch.stop()
        assert watch.samples == 0
        assert watch.blind_s > 0.2


def test_a_watch_with_a_failed_thread_counts_as_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyWatch, "_sample", lambda _: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    watch = CopyWatch(Tree(os.getpid()))
    watch.start()
    time.sleep(0.3)

    assert not watch.is_alive()
    assert watch.blind_s > 0.2
    watch.stop()
    assert watch.blind_s > 0.2


def test_remaining_processes_of_a_job_are_named() -> None:
    tree = Tree(os.getpid())
    assert tree.left_of_jobs() == []
    with process("everstep r0") as rank, process("everstep s2") as store:
        assert set(tree.left_of_jobs()) == {
            f"process {rank.pid} (everstep r0)",
            f"process {store.pid} (everstep s2)",
        }
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
        assert tree.left_of_jobs() == [f"process {store.pid} (everstep s2)"]


def test_a_new_rank_process_is_noticed() -> None:
    with process("everstep r1") as old, process("everstep s1") as store, process("everstep r1") as new:
        assert {old.pid, store.pid, new.pid} <= (children(os.getpid()) or set())
        assert await_rank_of(os.getpid(), {old.pid}, 5.0) == new.pid
        assert await_rank_of(os.getpid(), {old.pid, new.pid}, 0.05) is None
