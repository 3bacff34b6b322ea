"""The process that keeps a local cluster's processes running, as systemd or a kubelet does on real machines.

It runs in the background, and may be killed: the processes continue, and the next ``everstep up`` starts a new
supervisor that adopts them. The supervisor detects a death by pidfd within milliseconds, and restarts the process at
once; only a process that dies repeatedly after its start is restarted later.

    SIGHUP   read the changed plan, and start new processes
    SIGTERM  stop all processes in order, remove the shared memory, and exit
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from controlplane.local import cluster_processes, ports
from controlplane.local.plan import ClusterPlan, ProcessPlan, Running, State, is_held
from controlplane.local.stopping import make_shared_memory, remove_shared_memory, stop_all
from everstep.base.addresses import parse_address
from everstep.base.text import signal_name
from everstep.rank import environment
from everstep.system import private_files as private

QUICK_DEATH_S = 2.0
"""The death of a process younger than this is a quick death, seconds."""
FREE_RESTARTS = 2
"""Up to this many quick deaths in a row, a process is restarted at once; after more, it is restarted later."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Bounds of the wait before a restart, seconds; the wait doubles with each quick death."""
LOG_LIMIT = 20 << 20
"""Size above which a log is rotated when its process is started, bytes; one older file is kept."""

HELD_CHECK_S = 0.05
"""Time between two checks whether a process is still held, seconds."""

_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs the processes of one plan until SIGTERM."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.plan = ClusterPlan.load(home)
        self.state = State.load(home)
        self._selector = selectors.DefaultSelector()
        self._watched: set[str] = set()  # names of processes with an open pidfd
        self._began: dict[str, float] = {}
        self._quick: dict[str, int] = {}
        self._due: dict[str, float] = {}  # name → monotonic time of its next start
        self._exits: dict[int, str] = {}  # pid → how it ended
        self._held: set[str] = set()  # names of processes that a drill keeps down
        self._claims = ports.Claims("owned")
        self._stop = self._reload = False

    def begin(self) -> None:
        """Adopt the processes that run, and start those that do not."""
        me = cluster_processes.identify(os.getpid())
        assert me is not None
        self.state.supervisor_pid, self.state.supervisor_start = me
        self.state.phase = "running"
        self._listen_to_signals()
        make_shared_memory(Path(self.plan.shm), self.home)
        self._own_addresses()
        self._adopt()
        self._start_missing()

    def run(self) -> None:
        """Keep all processes running until SIGTERM, then stop them."""
        while not self._stop:
            self._turn()
        self._shut_down()

    def _turn(self) -> None:
        waits = [due - time.monotonic() for due in self._due.values()] + [HELD_CHECK_S] * bool(self._held)
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._died(key.data, key.fd)
        self._reap()
        if self._reload:
            self._reload = False
            self._read_plan()
        self._start_missing()

    def _read_plan(self) -> None:
        before = {plan.name: plan for plan in self.plan.processes}
        try:
            self.plan = ClusterPlan.load(self.home)
        except (OSError, ValueError) as error:
            self._log(f"plan.json cannot be read ({error}): keeping the old plan")
            return
        self._own_addresses()
        for plan in self.plan.processes:
            running = self.state.processes.get(plan.name)
            if running and plan.name in self._watched and plan != before.get(plan.name, plan):
                self._log(f"the plan of {plan.name} (pid {running.pid}) has changed: restarting it")
                cluster_processes.send(running.process, signal.SIGTERM)

    def _own_addresses(self) -> None:
        """Claim all addresses, so that no other cluster chooses one of them during a restart."""
        for address in self.plan.addresses:
            if not self._claims.claim(*parse_address(address)):
                self._log(f"another cluster has the address {address} too: only one of them can listen there")

    def _listen_to_signals(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", True))
        signal.signal(signal.SIGHUP, lambda *_: setattr(self, "_reload", True))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the selector
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _adopt(self) -> None:
        known = {running.pid for running in self.state.processes.values() if cluster_processes.alive(running.process)}
        if not known:
            self.state.processes = {}  # the state, with its restart counts, is from an earlier start of the cluster
        for plan in self.plan.processes:
            running = self.state.processes.get(plan.name)
            if running is None or running.pid not in known:
                # A supervisor that was killed right after it started a process did not record it.
                if not (found := cluster_processes.find_command(self.plan.cluster_id, plan.argv, known)):
                    continue
                known.add(found.pid)
                running = Running(*found, plan.kind, running.restarts + 1 if running else 0)
                self.state.processes[plan.name] = running
            self._watch(plan.name, running.pid, running.process)
            self._log(f"{plan.name} (pid {running.pid}) is running already: adopted it")
        self.state.save(self.home)

    def _watch(self, name: str, pid: int, adopted: cluster_processes.Process | None = None) -> None:
        self._began[name] = time.monotonic()
        with suppress(ProcessLookupError):  # it has ended already: _start_missing starts it again
            descriptor = os.pidfd_open(pid)
            if adopted and not cluster_processes.alive(adopted):
                os.close(descriptor)  # another process has this pid by now
                return
            self._selector.register(descriptor, selectors.EVENT_READ, name)
            self._watched.add(name)

    def _start_missing(self) -> None:
        held = set()
        for plan in self.plan.processes:
            if plan.name in self._watched or self._due.get(plan.name, 0.0) > time.monotonic():
                continue
            self._due.pop(plan.name, None)
            if is_held(self.home, plan.name):
                held.add(plan.name)
            else:
                self._start(plan, self.state.processes.get(plan.name))
        for name in sorted(held - self._held):
            self._log(f"{name} is held down by a drill, so it is not started")
        self._held = held

    def _start(self, plan: ProcessPlan, before: Running | None) -> None:
        log = self.home / "logs" / f"{plan.name}.log"
        private.make_folder(log.parent)
        if log.exists() and log.stat().st_size > LOG_LIMIT:
            log.rename(log.with_suffix(".log.1"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        try:
            pid = os.posix_spawn(
                plan.argv[0],
                plan.argv,
                os.environ | plan.env | {environment.CLUSTER: self.plan.cluster_id},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
            )
        except OSError as error:
            self._log(f"{plan.name} cannot be started: {plan.argv[0]}: {error}")
            self._due[plan.name] = time.monotonic() + LONGEST_WAIT_S
            return
        identity = cluster_processes.identify(pid) or cluster_processes.Process(pid, 0)
        restarts = before.restarts + 1 if before else 0
        self.state.processes[plan.name] = Running(*identity, plan.kind, restarts)
        self.state.save(self.home)
        self._watch(plan.name, pid)
        self._log(f"{plan.name} started (pid {pid}{f', restart {restarts}' if restarts else ''})")

    def _died(self, name: str, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._watched.discard(name)
        self._reap()
        running, lived = self.state.processes[name], time.monotonic() - self._began[name]
        how = self._exits.pop(running.pid, "ended (its exit is not known, since it was adopted)")
        self._log(f"{name} (pid {running.pid}) {how} after {lived:.1f} s")
        # A kill from outside counts too, since the kernel kills repeatedly if memory runs out.
        self._quick[name] = 0 if lived > QUICK_DEATH_S else self._quick.get(name, 0) + 1
        if (excess := self._quick[name] - FREE_RESTARTS) > 0:
            wait = min(FIRST_WAIT_S * 2.0**excess, LONGEST_WAIT_S)
            self._due[name] = time.monotonic() + wait
            self._log(f"{name} died quickly {self._quick[name]} times in a row: restarting it in {wait:.1f} s")

    def _reap(self) -> None:
        """Collect the exit codes of all dead children, which include orphans of dead agents."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            how = f"exited with code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
            if any(running.pid == pid for running in self.state.processes.values()):
                self._exits[pid] = how

    def _shut_down(self) -> None:
        self._log("stopping")
        stop_all(self.state, self.plan.cluster_id, self._phase)
        self._reap()
        remove_shared_memory(Path(self.plan.shm))
        (self.home / "state.json").unlink(missing_ok=True)
        self._log("stopped")

    def _phase(self, text: str) -> None:
        self.state.phase = text
        self.state.save(self.home)
        self._log(text)

    def _log(self, text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        print(f"{stamp}.{int(now % 1 * 1000):03d} {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Run a supervisor in the background: ``python -m controlplane.local.supervisor HOME``.

    The calling process ends once the supervisor has started all processes. Exit code 0: the supervisor runs; 3: another
    supervisor runs for this home.
    """
    home = Path(arguments[0])
    ready_read, ready_write = os.pipe()
    if os.fork():
        os.close(ready_write)
        verdict = os.read(ready_read, 1)
        return verdict[0] if verdict else 1
    os.close(ready_read)
    os.setsid()
    os.chdir(home)
    lock = private.open_file(home / "supervisor.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(ready_write, b"\x03")
        return 3
    # Orphans of a dead agent become children of this process, which collects their exit codes.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(home)
    supervisor.begin()
    os.write(ready_write, b"\x00")
    os.close(ready_write)
    supervisor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
