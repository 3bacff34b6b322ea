"""Injects the faults of a drill into ranks and workers.

A drill writes a *plan*, a JSON list of faults, to a file and names that file in ``EVERSTEP_FAULTS``. Without the
variable this module does nothing. Each fault fires once, in the first process that meets it. Before a fault acts, its
process creates the file ``<plan>.<id>``, the *mark*, with the time. Because of the mark, a restarted rank does not fire
the fault again, and the judge of the drill knows that the fault fired.

A fault may have ``marks``, a path that replaces ``<plan>`` in the name of its mark; plans of several drills use it. A
fault may have ``after``, the path of another fault's mark. Such a fault strikes only processes that began after the
other fault fired.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.rank import environment

Fault = Mapping[str, Any]
Action = Callable[[Fault], None]
TOGETHER_S = 5.0
"""Longest wait of a rank for the other ranks whose faults act at the same time, seconds."""
HOLD_S = 90.0
"""Longest wait of a job for its drill, seconds."""


def load_plan() -> tuple[Path, list[dict[str, Any]]] | None:
    """The plan's file and its faults; None: the environment names no plan."""
    name = os.environ.get(environment.FAULTS)
    if not name:
        return None
    path = Path(name)
    try:
        return path, json.loads(path.read_text())
    except FileNotFoundError:
        return path, []


def claim(plan: Path, fault: Fault, **details: Any) -> bool:
    """Mark a fault as fired, with details for the judge; False: it has fired already."""
    marker = _mark(plan, fault)
    # The name is unique to this call, since several threads of a worker may meet a fault at the same time.
    temporary = marker.with_name(f"{marker.name}.{uuid.uuid4().hex}.new")
    temporary.write_text(json.dumps({"time_ns": time.time_ns(), "pid": os.getpid(), **details}))
    try:
        # link() is atomic and refuses an existing name: the marker is never seen empty.
        os.link(temporary, marker)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def fired(plan: Path, fault: Fault) -> dict[str, Any] | None:
    """The contents of a fault's mark, ``{"time_ns": …, "pid": …}``; None: the fault did not fire yet."""
    try:
        mark: dict[str, Any] = json.loads(_mark(plan, fault).read_text())
    except FileNotFoundError:
        return None
    return mark


def _mark(plan: Path, fault: Fault, name: str | None = None) -> Path:
    """The file that marks a fault as fired, or a file beside it with another name."""
    base = Path(fault.get("marks", plan))
    return base.with_name(f"{base.name}.{name or fault['id']}")


class RankFaults:
    """The faults that a drill planned for one rank.

    Args:
        plan: The file of the plan.
        faults: All faults of the plan.
        rank: The rank.
    """

    def __init__(self, plan: Path, faults: list[dict[str, Any]], rank: int) -> None:
        self._plan = plan
        self._mine = [fault for fault in faults if _strikes(fault, rank) and self._begun_after(fault)]
        self._began = time.time()
        self.actions: dict[str, Action] = dict(ACTIONS)
        """Name of a fault → the function that acts it out in this process. ``DrilledRun`` adds faults inside torch."""

    @classmethod
    def from_environment(cls, rank: int) -> RankFaults | None:
        """The faults planned for a rank, or None when there are none."""
        loaded = load_plan()
        if loaded is None:
            return None
        faults = cls(*loaded, rank)
        return faults if faults._mine else None

    def meet(self, point: str, step: int) -> None:
        """Act out every fault that is due at a point (``begin``, ``step`` or ``save``) of a step."""
        for fault in [planned for planned in self._mine if self._is_due(planned, point, step)]:
            name = fault["fault"]
            if name == "bitflip":  # it imitates a broken machine, so it acts again and again
                claim(self._plan, fault)
                _flips(self._plan, fault).touch()
                self._act(fault)
                continue
            if name == "check":
                self._check(fault)
                continue
            self._mine.remove(fault)  # a rank meets each fault once, even if another rank fires it
            if fired(self._plan, fault) is None:
                self._await_others(fault)
                if claim(self._plan, fault):
                    if name == "nan":  # this process survives; further NaNs are meant for later processes
                        self._mine = [planned for planned in self._mine if planned["fault"] != name]
                        self._act(fault)
                        return
                    self._act(fault)

    def _act(self, fault: Fault) -> None:
        action = self.actions.get(fault["fault"])
        if action is None:
            raise ValueError(f"no rank fault is called {fault['fault']!r} here: some need everstep.join()")
        action(fault)

    def _is_due(self, fault: Fault, point: str, step: int) -> bool:
        if fault.get("point", "step") != point:
            return False
        due = bool(step >= fault.get("at_step", 0))
        if fault.get("only_in_job") and environment.REPLAY_STEPS in os.environ:
            # A replay begins with step 0 again, on a machine that is broken already.
            return _shows(fault) and (due or fired(self._plan, fault) is not None)
        return due

    def _check(self, fault: Fault) -> None:
        """Abort if the fault that ``of`` names has flipped bits in this generation, as a check of the gradients would.

        In a replay nothing is checked: its few steps are over before such a check would be due.
        """
        flips = _flips(self._plan, {**fault, "id": fault["of"]})
        if environment.REPLAY_STEPS not in os.environ and flips.exists() and flips.stat().st_mtime > self._began:
            claim(self._plan, fault)
            os.kill(os.getpid(), signal.SIGABRT)

    def _begun_after(self, fault: Fault) -> bool:
        return "after" not in fault or Path(fault["after"]).exists()

    def _await_others(self, fault: Fault) -> None:
        """Wait until the ranks of all faults in ``together`` are ready, so that these faults act at the same time."""
        together = fault.get("together", ())
        here = [_mark(self._plan, fault, f"{fault_id}.here") for fault_id in together]
        if not here:
            return
        _mark(self._plan, fault, f"{fault['id']}.here").touch()
        deadline = time.monotonic() + TOGETHER_S
        while not all(path.exists() for path in here) and time.monotonic() < deadline:
            time.sleep(0.001)


class BitFlip:
    """The fault ``bitflip``: calculations on a machine have one wrong bit, each with a certain probability.

    Args:
        plan: The file of the plan.
        fault: The fault; its ``probability`` is the probability of a wrong bit in one calculation, by default 1.
    """

    def __init__(self, plan: Path, fault: Fault) -> None:
        self._plan, self._fault = plan, fault
        self._random = random.Random(os.getpid())

    @classmethod
    def planned(cls, machine: str) -> BitFlip | None:
        """The bit flip that is planned for a machine; None: there is none."""
        loaded = load_plan()
        if loaded is None:
            return None
        plan, planned = loaded
        flips = (fault for fault in planned if fault["fault"] == "bitflip" and fault.get("machine") == machine)
        return next((cls(plan, fault) for fault in flips), None)

    def strikes(self) -> bool:
        """Whether the current calculation has to get a wrong bit; the first time is marked for the judge."""
        if self._random.random() >= self._fault.get("probability", 1.0):
            return False
        claim(self._plan, self._fault)
        return True


def _strikes(fault: Fault, rank: int) -> bool:
    """Whether a fault strikes a rank: it names the rank, or the machine whose first rank this is."""
    if "machine" in fault:
        if fault.get("of_tests"):
            return False
        if fault.get("only_in_job") and os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
            return False  # this machine computes alone
        return fault["machine"] == os.environ.get(environment.MACHINE) and os.environ.get("LOCAL_RANK") == "0"
    return bool(fault.get("rank") == rank)


def _flips(plan: Path, fault: Fault) -> Path:
    """The file that is touched at each flip of a bit."""
    return _mark(plan, fault, f"{fault['id']}.flips")


def _shows(fault: Fault) -> bool:
    """Whether a fault shows in this trial of a replay: in every n-th trial, where ``shows_every`` is n; 0: never."""
    every = int(fault.get("shows_every", 1))
    return every > 0 and int(os.environ.get(environment.GENERATION, "0")) % every == 0


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.Signals["SIG" + fault.get("signal", "KILL")])


def _stop(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _spin(_: Fault) -> None:
    sys.setswitchinterval(1e6)  # from now on no other thread of this process gets the GIL
    while True:
        pass


def _deadlock(_: Fault) -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def _exit(fault: Fault) -> None:
    os._exit(int(fault["code"]))


def _fill_memory(fault: Fault) -> None:
    Path(fault["group"], "cgroup.procs").write_text(str(os.getpid()))
    blocks = []
    while True:
        blocks.append(b"x" * (1 << 24))


def _wait(fault: Fault) -> None:
    """Wait until the drill creates the file ``until``, or for a limited time. This is not a fault."""
    deadline = time.monotonic() + fault.get("hold_s", HOLD_S)
    while not Path(fault["until"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _raise(fault: Fault) -> None:
    raise exception_named(fault["exception"])(fault.get("message") or f"injected by a drill: {fault['exception']}")


def exception_named(name: str) -> type[Exception]:
    """A built-in exception class by name, e.g. ``ValueError``."""
    import builtins

    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise ValueError(f"{name!r} is not a built-in exception; try ValueError, IndexError or RuntimeError")
    return kind


ACTIONS: Mapping[str, Action] = {
    "kill-rank": _kill,
    "kill-during-save": _kill,
    "stop-rank": _stop,
    "spin": _spin,
    "deadlock": _deadlock,
    "exit-rank": _exit,
    "oom": _fill_memory,
    "hold": _wait,
    "raise": _raise,
}
"""Name of a fault that needs no torch → the function that acts it out in this process."""
