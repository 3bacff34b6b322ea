"""This module runs one job on this machine, with its fork server, its ranks, its rendezvous store and its record.

The table of the fork server shows which processes were forked; the job's record survives the death of the fork server.
The table and the record are reconciled when an agent starts and when a fork server is lost, so that no rank is ever
started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from agent.checkpoints.job_checkpoints import JobCheckpoints
from agent.checkpoints.options import LaunchOptions
from agent.jobs.fork_request import check_launch, fork_arguments
from agent.jobs.host import Host
from agent.jobs.job_ranks import JobRanks
from agent.launcher.fork_client import ForkServerClient, label_of
from agent.launcher.processes import ending_of, kill_family, wait_gone
from agent.monitor.network.used import VARIABLES
from agent.reporting.paced_saves import saves_of
from agent.state.job_record import JobRecord, StoreRecord
from agent.state.rank_record import RankRecord, to_exit
from agent.tracer.processes import STOPPED
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.errors import AgentError, ConfigError, Fenced, ForkServerLost, StillDying
from everstep.system import private_files as private
from everstep.system.procfs import is_alive, process_of, state_of

RUN = "run"
"""File in a job's shared memory with the id of its run. It exists as long as this memory, even without a record."""
KILL_PATIENCE_S = 10.0
"""Killed ranks have this long to end before a command reports that they still exist, seconds."""
NAMED = 4
"""The number of processes that a message names; further processes are only counted."""
OUTPUT_PATIENCE_S = 0.5
"""If the disk is busy for longer, the output of the ranks that are started now is not kept, seconds."""
DRAIN_PATIENCE_S = 1.0
"""When a job ends, the agent waits this long until the last step records are on disk, seconds."""

logger = structlog.get_logger()


def run_in_memory(shm: Path) -> str:
    """Return the id of the run whose state is in a job's shared memory; empty: not known."""
    with contextlib.suppress(OSError):
        return (shm / RUN).read_text()
    return ""


class JobRunner:
    """Carries out the commands for one job, and has its fork server, its ranks and its checkpoints."""

    def __init__(self, host: Host, record: JobRecord) -> None:
        self.host = host
        self.record = record
        self.lock = asyncio.Lock()
        self.folder = host.state_dir / "jobs" / record.job
        self.shm = host.shm_dir / record.job
        self.ranks = JobRanks(host, record, lambda: self.server is not None and not self.server.lost)
        self.checkpoints = JobCheckpoints(
            host.place(record.job, record.run, record.version_of), host.exchange, record.fenced
        )
        self.server: ForkServerClient | None = None
        self._starting: asyncio.Task[ForkServerClient] | None = None
        self._log = logger.bind(job=record.job)

    # The fork server.

    async def ensure_server(self) -> ForkServerClient:
        """Return the job's fork server; starts a new one if there is none, or if the idle server has other code."""
        if self._is_outdated():
            await self.end_server()
        if self.server and not self.server.lost:
            return self.server
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_server())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        finally:
            if starting.done() and self._starting is starting:
                self._starting = None

    def _is_outdated(self) -> bool:
        """Return whether the fork server was started with other code, and runs no rank and no store."""
        if self.server is None or self.server.lost or self.record.living() or self.record.stores:
            return False
        return self.server.label != label_of(self.record.python, self.record.env)

    async def _fit_server(self, request: pb.StartStoreRequest | pb.Program) -> None:
        """Replace an idle fork server if a launch needs other imports."""
        wanted = (request.imports.python, dict(request.imports.env))
        if not request.HasField("imports") or (self.record.python, self.record.env) == wanted or self.record.living():
            return
        self._log.info("another fork server, for other imports", python=wanted[0], variables=sorted(wanted[1]))
        await self.end_server()
        self.record.python, self.record.env = wanted
        self.ranks.save()

    async def end_server(self) -> None:
        """End the job's fork server and all processes that it forked."""
        server, self.server = self.server, None
        if server:
            await server.end()

    def server_is_silent(self) -> bool:
        """Return whether the job's fork server lives but never answered this agent."""
        return self.server is None and is_alive(self.record.fork_server_pid, self.record.fork_server_ticks)

    async def _end_silent(self) -> None:
        """Kill a fork server that does not answer, because two servers could start a rank twice; its ranks continue."""
        if self.server_is_silent():
            pid, ticks = self.record.fork_server_pid, self.record.fork_server_ticks
            self._log.warning("killing a fork server that does not answer; its ranks continue", pid=pid)
            signal_process(pid, signal.SIGKILL)
            await wait_gone(pid, ticks, KILL_PATIENCE_S)
            self.ranks.find_orphans()

    async def _start_server(self) -> ForkServerClient:
        await self._end_silent()
        server = await self.host.fork_servers.assign(self.record.job, self.record.python, self.record.env)
        self.attach(server)
        self.ranks.save()
        self._log.info("fork server is ready", pid=server.pid, seconds=round(server.seconds, 2))
        return server

    def attach(self, server: ForkServerClient) -> None:
        """Connect a fork server to this job, with all processes that it has forked."""
        self.server = server
        server.on_exit = self.ranks.exit_reported
        server.on_lost = lambda: self.host.spawn(self._server_lost(server))
        self.record.fork_server_pid, self.record.fork_server_ticks = server.pid, server.start_ticks
        self.ranks.take_over(server.table)
        if server.lost:
            server.on_lost()

    async def _server_lost(self, server: ForkServerClient) -> None:
        """Handle the death of the fork server: its ranks continue, and a new fork server is started."""
        end = await self.host.reaper.end_of(server.pid, server.start_ticks)
        server.forget()
        self._log.warning("the fork server died; its ranks continue", pid=server.pid, how=end.kind, value=end.value)
        died = pb.ForkServerDied(pid=server.pid, exit=to_exit(end))
        self.host.log.append(job=self.record.job, generation=self.record.generation, fork_server_died=died)
        if self.record.released:
            return
        self.ranks.find_orphans()
        try:
            await self.ensure_server()
        except AgentError as error:
            self._log.error("no new fork server yet", reason=str(error))

    # Commands.

    async def start_store(self, request: pb.StartStoreRequest) -> StoreRecord:
        """Return the rendezvous store of a generation, which is started if it does not run."""
        generation = request.generation
        self._check_fence(generation, begins_run=request.begins_run)
        await self._fit_server(request)
        for _ in range(3):
            server = await self.ensure_server()
            try:
                row = await server.request(
                    "store",
                    generation=generation,
                    fenced=self.record.fenced,
                    host=self.host.address,
                    ports=[request.first_port, request.last_port],
                )
            except ForkServerLost:
                continue
            store = self.ranks.record_store(row)
            self.ranks.save()
            return store
        raise AgentError("the fork server died repeatedly; see the agent's log")

    async def launch(self, request: pb.LaunchRequest) -> list[RankRecord]:
        """Start the ranks of a generation that do not run yet; returns all of its ranks."""
        check_launch(request)
        generation = request.generation
        self._check_fence(generation, begins_run=request.begins_run)
        if generation < self.record.generation:
            raise Fenced(f"generation {generation} is older than {self.record.generation}, which was launched already")
        await self._fit_server(request.program)
        for _ in range(3):
            server = await self.ensure_server()
            self.ranks.find_orphans()
            alive = [rank for rank in self.record.living() if rank.generation < generation]
            if alive:
                raise AgentError(
                    f"rank {alive[0].rank} of generation {alive[0].generation} still lives (pid {alive[0].pid}): "
                    f"stop generation {generation - 1} first"
                )
            self.record.launched(generation, request.program.code, request.version)
            missing = [rank for rank in request.ranks if not self.record.find(generation, rank.rank)]
            await self._open_checkpoints(request, {rank.rank for rank in missing})
            try:
                if missing:
                    await self._check_disk()
                    arguments = fork_arguments(
                        request,
                        missing,
                        host=self.host,
                        record=self.record,
                        reports=self.ranks.reports,
                        output=self.ranks.output_path,
                    )
                    self.record.network = {
                        name: arguments["env"][name] for name in VARIABLES if name in arguments["env"]
                    }
                    reply = await server.request("fork", **arguments)
                    for row in reply["ranks"]:
                        self.ranks.record_rank(row)
                break
            except ForkServerLost:
                await wait_gone(server.pid, server.start_ticks, KILL_PATIENCE_S)
                self.ranks.find_orphans()  # ranks that the server has forked must not be forked again
        else:
            raise AgentError("the fork server died repeatedly; see the agent's log")
        self.record.generation = generation
        self.record.prune()
        self.ranks.save()
        self.ranks.reports.remove_before(generation - 1)
        self._log.info("launched", generation=generation, ranks=[rank.rank for rank in request.ranks])
        wanted = {rank.rank for rank in request.ranks}
        return [rank for rank in self.record.of(generation) if rank.rank in wanted]

    async def _check_disk(self) -> None:
        """Wait until the log files of new ranks are made; if the disk hangs, the output of these ranks is not kept."""
        self.ranks.keeps_output = await self.host.disk.flush(OUTPUT_PATIENCE_S)
        if not self.ranks.keeps_output:
            self._log.error("the output of ranks is not kept: the state folder's disk does not answer")

    async def _open_checkpoints(self, request: pb.LaunchRequest, unforked: set[int]) -> None:
        """Prepare the copying of state before ranks are forked: drop abandoned copies, then start the copying."""
        if unforked or self.checkpoints.opened is None:
            launch = LaunchOptions.of(request)
            self.record.terms, self.record.emptied = launch.to_json(), False
            self.ranks.save()
            self.mark_memory()
            await asyncio.to_thread(self.checkpoints.launch, launch, unforked)

    async def resume_checkpoints(self) -> None:
        """Resume copying after a restart of the agent, unless the newest launch was stopped or its memory is lost."""
        if self.record.generation > 0 and not self.shm.is_dir():
            self.record.emptied, self.record.heard = True, 0
        if not self.record.terms or self.record.emptied:
            return
        try:
            launch = LaunchOptions.from_json(self.record.terms)
        except ValueError as error:
            self._log.error("backups stop until the next launch", reason=str(error))
            return
        if launch.generation > self.record.fenced:
            await asyncio.to_thread(self.checkpoints.open, launch)

    def disk_path(self) -> str:
        """Return the folder for disk checkpoints in the newest launch; empty: there is none, or it is not known."""
        if not self.record.terms:
            return ""
        with contextlib.suppress(ValueError):
            return LaunchOptions.from_json(self.record.terms).options.disk_path
        return ""

    def mark_memory(self) -> None:
        """Write the run's id into the job's shared memory."""
        if self.record.run:
            private.replace(private.make_folder(self.shm) / RUN, self.record.run)

    def is_unknown(self) -> bool:
        """Return whether the job is unknown here: it was not prepared, or its shared memory is gone."""
        return self.record.emptied or not self.record.prepared

    async def stop(self, generation: int, grace_s: float) -> list[RankRecord]:
        """Kill and fence every generation up to ``generation``; returns the ranks of the newest of these
        generations."""
        self.record.fenced = max(self.record.fenced, generation)
        self.record.heard = max(self.record.heard, generation)
        self.host.records.fence(self.record)  # from here on the fence survives the agent; the fork server keeps it too
        for rank in self.record.living():
            if rank.generation <= generation:
                self.ranks.killed.setdefault(rank.pid, time.monotonic() + grace_s)
        shutting = asyncio.create_task(asyncio.to_thread(self.checkpoints.stop, generation))
        try:
            await self._end_ranks(generation, grace_s)
        finally:
            await shutting
        older = [rank.generation for rank in self.record.ranks if rank.generation <= generation]
        return self.record.of(max(older)) if older else []

    async def _end_ranks(self, generation: int, grace_s: float) -> None:
        if self.server and not self.server.lost:
            with contextlib.suppress(ForkServerLost):
                reply = await self.server.request(
                    "kill", generation=generation, grace_s=grace_s, timeout_s=grace_s + 2 * KILL_PATIENCE_S
                )
                self.ranks.take_over(reply)
                if reply["left"]:
                    raise self._still_dying(reply["left"])
        self.ranks.find_orphans()
        await self._kill_orphans(generation, grace_s)
        self.ranks.save()

    async def _kill_orphans(self, generation: int, grace_s: float) -> None:
        """Kill the ranks and stores that a dead fork server left behind."""
        ranks = [rank for rank in self.record.living() if rank.generation <= generation]
        for rank in ranks:
            ends = rank.ending or ending_of(rank.pid, rank.start_ticks)
            rank.stopped = rank.stopped or (ends is None and is_alive(rank.pid, rank.start_ticks))
        await asyncio.gather(*(self._kill(r.pid, r.start_ticks, grace_s, self.ranks.mark(r)) for r in ranks))
        for rank in ranks:
            self.ranks.ended(rank, await self.host.reaper.end_of(rank.pid, rank.start_ticks))
        for store in [store for store in self.record.stores if store.generation <= generation]:
            await self._kill(store.pid, store.start_ticks, 0.0)
            self.record.stores.remove(store)

    async def _kill(self, pid: int, ticks: int, grace_s: float, mark: str = "") -> None:
        if grace_s > 0 and is_alive(pid, ticks):
            signal_process(pid, signal.SIGTERM)
            await wait_gone(pid, ticks, grace_s)
        kill_family(pid, ticks, mark)
        if not await wait_gone(pid, ticks, KILL_PATIENCE_S):
            raise self._still_dying([pid])

    def _still_dying(self, pids: Iterable[int]) -> StillDying:
        """Return the error for killed processes that still exist: ``rank 5 (pid 4711, state D) has been dying …``."""
        ranks = {rank.pid: rank.rank for rank in self.record.living()}
        texts = []
        for pid in pids:
            since = self.ranks.killed.setdefault(pid, time.monotonic() - KILL_PATIENCE_S)
            process = process_of(pid)
            state = process.state if process else "gone"
            who = f"rank {ranks[pid]} (pid {pid}, state {state})" if pid in ranks else f"process {pid}"
            texts.append(f"{who} has been dying for {max(time.monotonic() - since, 0):.0f} s")
        return StillDying(listed(texts, NAMED))

    def progress(self) -> list[pb.RankProgress]:
        """Return the progress of each rank of the newest generation."""
        messages = []
        disk = f"the state folder cannot be written: {problem}" if (problem := self.host.disk.problem) else ""
        for rank in self.record.of(self.record.generation):
            message = pb.RankProgress(
                rank=rank.rank,
                generation=rank.generation,
                pid=rank.pid,
                alive=rank.end is None,
                exit=to_exit(rank.end) if rank.end else None,
                completed_steps=-1,
                loss=math.nan,
                grad_norm=math.nan,
                saved=self.checkpoints.place.saved.of(rank.rank),
                stopped=rank.end is None and is_stopped(rank),
            )
            if disk:
                message.saved.disk_problem = "; ".join(filter(None, [disk, message.saved.disk_problem]))
            if report := self.ranks.reports.get(rank.rank, rank.generation):
                now = report.snapshot()
                message.attached, message.finished = now.attached, now.finished
                message.completed_steps, message.optimizer_steps = now.completed_steps, now.optimizer_steps
                message.reports, message.stepped_ns = now.published, now.stepped_ns
                message.saves.CopyFrom(saves_of(report))
                message.aligned = report.alignment().aligned
                message.milestones.CopyFrom(pb.Milestones(**now.milestones))
                message.tokens = self.ranks.archive.tokens(rank.rank, rank.generation)
                if now.newest:
                    message.metrics.CopyFrom(self.ranks.metrics.message(report, now.flops))
                    message.loss, message.grad_norm = now.newest.loss, now.newest.grad_norm
            messages.append(message)
        return messages

    async def release(self) -> int:
        """End the job on this machine, with its fork server and shared memory; returns the bytes that were freed."""
        newest = max([self.record.generation, *(store.generation for store in self.record.stores), 0])
        self.record.released = True  # set first, so that nothing is started any more
        try:
            await self.stop(max(newest, self.record.fenced), 0.0)
        except AgentError:
            self.record.released = False  # a process cannot be killed: the caller must ask again
            raise
        if self._starting:
            with contextlib.suppress(AgentError):
                await asyncio.shield(self._starting)
        await self._end_silent()
        if self.server:
            await self.host.fork_servers.give_back(self.server)
            self.server = None
        self.record.fork_server_pid = self.record.fork_server_ticks = 0
        self.ranks.drain()
        await self.host.disk.flush(DRAIN_PATIENCE_S)
        self.ranks.reports.close()
        await asyncio.to_thread(self.checkpoints.close)
        self.host.exchange.tokens.forget(self.record.job)
        freed = sum(path.stat().st_blocks * 512 for path in self.shm.rglob("*") if path.is_file())
        await asyncio.to_thread(shutil.rmtree, self.shm, ignore_errors=True)
        self.ranks.save()
        return freed

    async def detach(self) -> None:
        """Detach from the job when the agent ends; the ranks continue to run."""
        self.ranks.close()
        if self.server:
            await self.server.disconnect()
        await asyncio.to_thread(self.checkpoints.close)

    def check_present(self) -> None:
        """Refuse a command that waited for the lock while the job ended.

        Raises:
            AgentError: the job is over on this machine.
        """
        if self.record.released:
            raise AgentError(f"{self.record.job} is over on {self.host.machine}: its memory was freed")

    def _check_fence(self, generation: int, *, begins_run: bool) -> None:
        self.check_present()
        if generation < 1:
            raise ConfigError(f"generation is {generation}; generations start at 1")
        if generation <= self.record.fenced:
            raise Fenced(
                f"generation {generation} of {self.record.job} was stopped: "
                f"everything up to {self.record.fenced} is fenced"
            )
        lost = self.record.emptied or self.record.generation == 0
        if lost and not begins_run and generation - 1 > self.record.heard:
            # The fence of the previous generation may be lost too. Before each valid launch, the previous generation
            # was stopped, unless it belonged to another run, whose data was released.
            raise Fenced(
                f"{self.host.machine} lost what it knew of {self.record.job}, and generation {generation - 1} was not "
                "stopped here after that, so this launch may be a late one. Stop that generation first"
            )


def is_stopped(rank: RankRecord) -> bool:
    """Return whether the process of a rank is stopped."""
    return state_of(rank.pid, rank.start_ticks) == STOPPED


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
