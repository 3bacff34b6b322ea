"""One job on this machine: its fork server, its ranks, its store, and what is known of them.

The fork server's table is the truth about what was forked; the job's record is
what survives when the fork server dies. Both are reconciled when an agent
starts and when a fork server is lost, so that no rank is ever started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from agent.checkpoints.job_checkpoints import JobCheckpoints
from agent.checkpoints.options import LaunchOptions
from agent.jobs.fork_request import check_launch, fork_arguments
from agent.jobs.host import Host
from agent.launcher.fork_client import ForkServerClient, ForkServerLost
from agent.launcher.processes import End, Watch, is_alive, kill_family, maps, start_ticks, state, wait_gone
from agent.reporting import rank_logs
from agent.reporting.step_archive import Reports, StepArchive
from agent.state.job_record import EndRecord, JobRecord, RankRecord, StoreRecord
from agent.v1 import agent_pb2 as pb
from everstep import environment, private
from everstep.errors import AgentError, ConfigError, Fenced, StillDying
from everstep.step_reports import Snapshot
from everstep.text import listed

RUN = "run"
"""File in a job's shared memory: of which run it is. It lasts as long as the memory, whatever becomes of the record."""
PUSH_PATIENCE_S = 2.0
"""A rank that is gone is reported by its fork server within this time, or without it (ours)."""
KILL_PATIENCE_S = 10.0
"""Ranks that are killed have this long to be gone before a command says that they are not yet (ours)."""
UNTOLD = -1
"""``sequence`` of a rank whose end is to be told, and has no number yet."""
SAID_PATIENCE_S = 2.0
"""An end is told without the rank's last words where reading them takes longer (ours)."""
NAMED = 4
"""Processes that a message names; the others are counted."""
OUTPUT_PATIENCE_S = 0.5
"""A disk that is busy for longer gets no output of the ranks that are started now (ours)."""
DRAIN_PATIENCE_S = 1.0
"""The last step records have this long to reach the disk when a job ends (ours)."""

logger = structlog.get_logger()


class JobRunner:
    """Carries out the commands for one job and watches its ranks."""

    def __init__(self, host: Host, record: JobRecord) -> None:
        self.host = host
        self.record = record
        self.lock = asyncio.Lock()
        self.folder = host.state_dir / "jobs" / record.job
        self.shm = host.shm_dir / record.job
        host.disk.run(("logs", record.job), lambda: private.make_folder(self.folder / "logs"))
        self.archive = StepArchive(self.folder)
        self.reports = Reports(self.shm)
        self._drained = Reports(self.shm)
        """Those of the thread that drains them."""
        self.custody = JobCheckpoints(host.place(record.job, record.run), host.exchange, record.fenced)
        self.server: ForkServerClient | None = None
        self._starting: asyncio.Task[ForkServerClient] | None = None
        self._watches: dict[tuple[int, int], Watch] = {}
        """Generation and rank → who notices its end."""
        self._killed: dict[int, float] = {}
        """Since when each process dies that was killed, monotonic seconds."""
        self._keeps_output = True
        """Whether the newest launch could count on the disk for what its ranks print."""
        self._log = logger.bind(job=record.job)

    # The fork server.

    async def ensure_server(self) -> ForkServerClient:
        """The job's fork server; starts one when there is none."""
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

    def server_is_silent(self) -> bool:
        """Whether the job's fork server lives but never answered this agent."""
        return self.server is None and is_alive(self.record.fork_server_pid, self.record.fork_server_ticks)

    async def _end_silent(self) -> None:
        """Kill a fork server that does not answer, for two could start a rank twice; its ranks live on."""
        if self.server_is_silent():
            pid, ticks = self.record.fork_server_pid, self.record.fork_server_ticks
            self._log.warning("killing a fork server that does not answer; its ranks live on", pid=pid)
            signal_process(pid, signal.SIGKILL)
            await wait_gone(pid, ticks, KILL_PATIENCE_S)
            self.find_orphans()

    async def _start_server(self) -> ForkServerClient:
        await self._end_silent()
        server = await self.host.fork_servers.take(self.record.job, self.record.python, self.record.env)
        self.attach(server)
        self.save()
        self._log.info("fork server is ready", pid=server.pid, seconds=round(server.seconds, 2))
        return server

    def attach(self, server: ForkServerClient) -> None:
        """Take a fork server as this job's, with all that it has forked."""
        self.server = server
        server.on_exit = self._exit_pushed
        server.on_lost = lambda: self.host.spawn(self._server_lost(server))
        self.record.fork_server_pid, self.record.fork_server_ticks = server.pid, server.start_ticks
        self.take_over(server.table)
        if server.lost:
            server.on_lost()

    def take_over(self, table: Mapping[str, Any]) -> None:
        """Bring the record up to the fork server's table."""
        for row in table["ranks"]:
            self._recorded(row)
            if row["exit"]:
                self._exit_pushed(row)
        for row in table["stores"]:
            if row["exit"] is None:
                self._store_recorded(row)
        self.record.generation = max([self.record.generation, *(r.generation for r in self.record.ranks)])

    async def _server_lost(self, server: ForkServerClient) -> None:
        """The fork server died; its ranks live on, and we are their parent if it was our child."""
        end = await self.host.reaper.end_of(server.pid, server.start_ticks)
        server.forget()
        self._log.warning("the fork server died; ranks live on", pid=server.pid, how=end.kind, value=end.value)
        died = pb.ForkServerDied(pid=server.pid, exit=to_exit(end))
        self.host.log.append(job=self.record.job, generation=self.record.generation, fork_server_died=died)
        if self.record.released:
            return
        self.find_orphans()
        try:
            await self.ensure_server()
        except AgentError as error:
            self._log.error("no new fork server yet", reason=str(error))

    def find_orphans(self) -> None:
        """Record ranks that a dead fork server forked and nobody was told of: their report files name them."""
        for path in self.shm.glob("report-*"):
            _, rank, generation = path.name.split("-")
            if not generation.isdecimal() or self.record.find(int(generation), int(rank)):
                continue  # one that was never finished, or is known
            report = self.reports.get(int(rank), int(generation))
            found = report.snapshot() if report else None
            if found and found.pid and maps(found.pid, path):
                row = {
                    "rank": int(rank),
                    "generation": int(generation),
                    "pid": found.pid,
                    "start_ticks": start_ticks(found.pid),
                    "forked_ns": found.milestones["forked"],
                }
                self._recorded(row)
        self.save()

    def forget_other_boots(self, boot: str) -> None:
        """Tell that ranks ended which ran before the machine was started anew, and never look for their numbers."""
        before, self.record.boot = self.record.boot, boot
        if before in {"", boot}:
            return
        self._log.warning("the machine was started anew: nothing of the job runs", before=before)
        self.record.fork_server_pid = self.record.fork_server_ticks = 0
        self.record.stores = []
        for rank in self.record.living():
            self._ended(rank, End("unknown", 0, time.time_ns()))

    # Ranks.

    def _recorded(self, row: Mapping[str, Any]) -> RankRecord:
        found = self.record.find(row["generation"], row["rank"])
        if found is None:
            fields = ("rank", "generation", "pid", "start_ticks", "forked_ns")
            found = RankRecord(**{name: row[name] for name in fields})
            self.record.ranks.append(found)
        if found.end is None and _key(found) not in self._watches and not row.get("exit"):
            self.watch(found)
        return found

    def watch(self, rank: RankRecord) -> None:
        """Notice the end of a rank whatever becomes of its fork server."""

        def ended() -> None:
            self._watches.pop(_key(rank), None)
            self.host.spawn(self._gone(rank))

        if is_alive(rank.pid, rank.start_ticks):
            self.host.reaper.forget(rank.pid)
        self._watches[_key(rank)] = Watch(rank.pid, rank.start_ticks, ended)

    async def _gone(self, rank: RankRecord) -> None:
        deadline = time.monotonic() + PUSH_PATIENCE_S
        while self.server and not self.server.lost and time.monotonic() < deadline:
            if rank.end:
                return
            await asyncio.sleep(0.01)
        if rank.end:
            return
        end = await self.host.reaper.end_of(rank.pid, rank.start_ticks)
        kill_family(rank.pid, rank.start_ticks, self._mark(rank))
        self._ended(rank, end)

    def _exit_pushed(self, row: Mapping[str, Any]) -> None:
        if row["rank"] < 0:
            return
        rank = self._recorded(row)
        rank.stopped = rank.stopped or row["stopped"]
        self._ended(rank, End(**row["exit"]))

    def _ended(self, rank: RankRecord, end: End) -> None:
        """Note the end of a rank, once, and tell it unless it was ours."""
        if rank.end:
            return
        if watch := self._watches.pop(_key(rank), None):
            watch.close()
        self._killed.pop(rank.pid, None)
        rank.end = EndRecord(kind=end.kind, value=end.value, time_ns=end.time_ns)
        rank.sequence = 0 if rank.stopped else UNTOLD
        self.save()
        self.drain()
        if rank.sequence == UNTOLD:
            self.host.spawn(self._explain(rank))

    async def _explain(self, rank: RankRecord) -> None:
        """Tell of an end, with the exception that the rank's output names."""
        rank.exception = rank_logs.exception_in(await self.said(rank))
        if self.record.released or rank.sequence != UNTOLD:
            return
        # First the record, with the number that the observation is going to have: an agent that is
        # killed between the two lines below tells it again from the record, and never twice.
        rank.sequence = self.host.log.last + 1
        self.save()
        self._tell(rank, self.snapshot(rank))

    def _tell(self, rank: RankRecord, now: Snapshot | None) -> None:
        assert rank.end
        exited = pb.RankExited(
            rank=rank.rank,
            pid=rank.pid,
            exit=to_exit(rank.end),
            attached=bool(now and now.attached),
            finished=bool(now and now.finished),
            completed_steps=now.completed_steps if now else -1,
            exception=rank.exception,
        )
        self.host.log.append(job=self.record.job, generation=rank.generation, rank_exited=exited)

    def retell(self, last_told: int) -> None:
        """Tell what a killed agent had recorded but not told; ``last_told`` is the newest number in the log."""
        for rank in self.record.ranks:
            if rank.end and rank.sequence == UNTOLD:
                self.host.spawn(self._explain(rank))
            elif rank.end and rank.sequence > last_told:
                rank.sequence = self.host.log.last + 1
                self._tell(rank, self.snapshot(rank))
        self.save()

    def snapshot(self, rank: RankRecord) -> Snapshot | None:
        """Where a rank stands."""
        report = self.reports.get(rank.rank, rank.generation)
        return report.snapshot() if report else None

    async def said(self, rank: RankRecord) -> bytes:
        """The end of what a rank wrote to stderr; nothing where the disk does not answer in time."""
        path = self.log_path(rank.rank, "err")
        try:
            text = await self.host.reads.do(lambda: rank_logs.tail(path, rank_logs.SEARCHED_BYTES), SAID_PATIENCE_S)
        except (TimeoutError, OSError, AgentError) as error:
            self._log.error("the output of a rank cannot be read", rank=rank.rank, reason=str(error) or "no answer")
            return b""
        return rank_logs.of_generation(text, rank.generation)

    def log_path(self, rank: int, suffix: str) -> Path:
        """Where the output of a rank is captured; suffix ``out`` or ``err``."""
        return self.folder / "logs" / f"rank-{rank}.{suffix}"

    def output_path(self, rank: int, suffix: str) -> Path:
        """Where a rank that is started now writes to: nowhere while the disk hangs, or it would hang with it."""
        return self.log_path(rank, suffix) if self._keeps_output else Path(os.devnull)

    # Commands.

    async def start_store(self, generation: int, *, begins_run: bool = False) -> StoreRecord:
        """Start the rendezvous store of a generation, or return it."""
        self._check_fence(generation, begins_run=begins_run)
        for _ in range(3):
            server = await self.ensure_server()
            try:
                row = await server.request(
                    "store", generation=generation, fenced=self.record.fenced, host=self.host.address
                )
            except ForkServerLost:
                continue
            store = self._store_recorded(row)
            self.save()
            return store
        raise AgentError("the fork server died again and again; see the agent's log")

    def _store_recorded(self, row: Mapping[str, Any]) -> StoreRecord:
        store = StoreRecord(**{name: row[name] for name in ("generation", "pid", "start_ticks", "port")})
        if store not in self.record.stores:
            self.record.stores.append(store)
        return store

    async def launch(self, request: pb.LaunchRequest) -> list[RankRecord]:
        """Start the ranks of a generation that do not run yet; returns all of them."""
        check_launch(request)
        generation = request.generation
        self._check_fence(generation, begins_run=request.begins_run)
        if generation < self.record.generation:
            raise Fenced(f"generation {generation} is older than {self.record.generation}, which was launched already")
        for _ in range(3):
            server = await self.ensure_server()
            self.find_orphans()
            alive = [rank for rank in self.record.living() if rank.generation < generation]
            if alive:
                raise AgentError(
                    f"rank {alive[0].rank} of generation {alive[0].generation} still lives (pid {alive[0].pid}): "
                    f"stop generation {generation - 1} first"
                )
            missing = [rank for rank in request.ranks if not self.record.find(generation, rank.rank)]
            await self._open_custody(request, {rank.rank for rank in missing})
            try:
                if missing:
                    await self._look_at_disk()
                    reply = await server.request("fork", **self._fork_arguments(request, missing))
                    for row in reply["ranks"]:
                        self._recorded(row)
                break
            except ForkServerLost:
                await wait_gone(server.pid, server.start_ticks, KILL_PATIENCE_S)
                self.find_orphans()  # what it managed to fork counts; only the rest is forked again
        else:
            raise AgentError("the fork server died again and again; see the agent's log")
        self.record.generation = generation
        self.record.prune()
        self.save()
        self.reports.remove_before(generation - 1)
        self._log.info("launched", generation=generation, ranks=[rank.rank for rank in request.ranks])
        wanted = {rank.rank for rank in request.ranks}
        return [rank for rank in self.record.of(generation) if rank.rank in wanted]

    def _fork_arguments(self, request: pb.LaunchRequest, ranks: list[pb.RankLaunch]) -> dict[str, Any]:
        return fork_arguments(
            request, ranks, host=self.host, record=self.record, reports=self.reports, output=self.output_path
        )

    async def _look_at_disk(self) -> None:
        """Before ranks are forked: their files are made by then, or the disk hangs and they get none."""
        self._keeps_output = await self.host.disk.settled(OUTPUT_PATIENCE_S)
        if not self._keeps_output:
            self._log.error("the output of ranks is not kept: the state folder's disk does not answer")

    async def _open_custody(self, request: pb.LaunchRequest, unforked: set[int]) -> None:
        """Before ranks are forked: forget copies that they do not go on from, make the bell, start to send."""
        if unforked or self.custody.terms is None:
            terms = LaunchOptions.of(request)
            self.record.terms, self.record.emptied = terms.to_json(), False
            self.save()
            self.mark_memory()
            await asyncio.to_thread(self.custody.launch, terms, unforked)

    async def resume_custody(self) -> None:
        """After a restart of the agent go on as the newest launch said, unless that was stopped or memory was lost."""
        if self.record.generation > 0 and not self.shm.is_dir():
            self.record.emptied, self.record.heard = True, 0
        if not self.record.terms or self.record.emptied:
            return
        try:
            terms = LaunchOptions.from_json(self.record.terms)
        except ValueError as error:
            self._log.error("backups stop until the next launch", reason=str(error))
            return
        if terms.generation > self.record.fenced:
            await asyncio.to_thread(self.custody.open, terms)

    def disk_path(self) -> str:
        """The folder for disk checkpoints that the newest launch named; empty: none, or nothing is known of it."""
        if not self.record.terms:
            return ""
        with contextlib.suppress(ValueError):
            return LaunchOptions.from_json(self.record.terms).options.disk_path
        return ""

    def mark_memory(self) -> None:
        """Say in shared memory of which run it is."""
        if self.record.run:
            private.replace(private.make_folder(self.shm) / RUN, self.record.run)

    def is_unknown(self) -> bool:
        """Whether the machine came here empty: its agent knows of no launch, or what was in shared memory is gone."""
        return self.record.emptied or not self.record.prepared

    async def stop(self, generation: int, grace_s: float) -> list[RankRecord]:
        """Kill and fence every generation up to one; returns the ranks of the newest of them."""
        self.record.fenced = max(self.record.fenced, generation)
        self.record.heard = max(self.record.heard, generation)
        self.host.records.fence(self.record)  # it holds from here on, whoever dies; the fork server keeps it too
        for rank in self.record.living():
            if rank.generation <= generation:
                self._killed.setdefault(rank.pid, time.monotonic() + grace_s)
        shutting = asyncio.create_task(asyncio.to_thread(self.custody.stop, generation))
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
                self.take_over(reply)
                if reply["left"]:
                    raise self._still_dying(reply["left"])
        self.find_orphans()
        await self._kill_orphans(generation, grace_s)
        self.save()

    async def _kill_orphans(self, generation: int, grace_s: float) -> None:
        """Kill what a dead fork server left."""
        ranks = [rank for rank in self.record.living() if rank.generation <= generation]
        for rank in ranks:
            rank.stopped = rank.stopped or is_alive(rank.pid, rank.start_ticks)
        await asyncio.gather(*(self._kill(r.pid, r.start_ticks, grace_s, self._mark(r)) for r in ranks))
        for rank in ranks:
            self._ended(rank, await self.host.reaper.end_of(rank.pid, rank.start_ticks))
        for store in [store for store in self.record.stores if store.generation <= generation]:
            await self._kill(store.pid, store.start_ticks, 0.0)
            self.record.stores.remove(store)

    def _mark(self, rank: RankRecord) -> str:
        return f"{environment.REPORT_FILE}={self.reports.path(rank.rank, rank.generation)}"

    async def _kill(self, pid: int, ticks: int, grace_s: float, mark: str = "") -> None:
        if grace_s > 0 and is_alive(pid, ticks):
            signal_process(pid, signal.SIGTERM)
            await wait_gone(pid, ticks, grace_s)
        kill_family(pid, ticks, mark)
        if not await wait_gone(pid, ticks, KILL_PATIENCE_S):
            raise self._still_dying([pid])

    def _still_dying(self, pids: Iterable[int]) -> StillDying:
        """Says who was killed and is not gone: ``rank 5 (pid 4711, state D) has been dying for 40 s``."""
        ranks = {rank.pid: rank.rank for rank in self.record.living()}
        said = []
        for pid in pids:
            since = self._killed.setdefault(pid, time.monotonic() - KILL_PATIENCE_S)
            who = f"rank {ranks[pid]} (pid {pid}, state {state(pid)})" if pid in ranks else f"process {pid}"
            said.append(f"{who} has been dying for {max(time.monotonic() - since, 0):.0f} s")
        return StillDying(listed(said, NAMED))

    async def release(self) -> int:
        """End the job here: fork server and shared memory; returns the bytes given back."""
        newest = max([self.record.generation, *(store.generation for store in self.record.stores), 0])
        self.record.released = True  # first, so that nothing is started any more
        try:
            await self.stop(max(newest, self.record.fenced), 0.0)
        except AgentError:
            self.record.released = False  # something cannot be killed: the caller has to ask again
            raise
        if self._starting:
            with contextlib.suppress(AgentError):
                await asyncio.shield(self._starting)
        await self._end_silent()
        if self.server:
            await self.host.fork_servers.give_back(self.server)
            self.server = None
        self.record.fork_server_pid = self.record.fork_server_ticks = 0
        self.drain()
        await self.host.disk.settled(DRAIN_PATIENCE_S)
        self.reports.close()
        await asyncio.to_thread(self.custody.close)
        self.host.exchange.tokens.forget(self.record.job)
        freed = sum(path.stat().st_blocks * 512 for path in self.shm.rglob("*") if path.is_file())
        await asyncio.to_thread(shutil.rmtree, self.shm, ignore_errors=True)
        self.save()
        return freed

    async def detach(self) -> None:
        """The agent ends, the job goes on."""
        for watch in self._watches.values():
            watch.close()
        if self.server:
            await self.server.disconnect()
        await asyncio.to_thread(self.custody.close)

    def drain(self) -> None:
        """Have the step records of the newest generation kept; returns at once."""
        ranks = [(rank.rank, rank.generation) for rank in self.record.of(self.record.generation)]
        self.host.disk.run(("steps", self.record.job, self.record.generation), lambda: self._drain(ranks))

    def _drain(self, ranks: list[tuple[int, int]]) -> None:
        """In the thread of the disk."""
        for rank, generation in ranks:
            if report := self._drained.get(rank, generation):
                self.archive.drain(report)

    def save(self) -> None:
        """Keep the record; nothing is waited for, and nothing fails."""
        self.host.records.keep(self.record)

    def check_present(self) -> None:
        """Refuse to go on; for commands that waited for the lock, and the job ended meanwhile.

        Raises:
            AgentError: the job is over here.
        """
        if self.record.released:
            raise AgentError(f"{self.record.job} is over on {self.host.machine}: its memory was given back")

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
            # What was fenced here may be lost with the rest. Whoever means it has stopped the one before it, unless
            # that was another run's, which gave everything back.
            raise Fenced(
                f"{self.host.machine} lost what it knew of {self.record.job}, and generation {generation - 1} was not "
                "stopped here since: this may be a late launch of one that was. Stop it first"
            )


def to_exit(end: End | EndRecord) -> pb.Exit:
    """An end as the schema says it."""
    kinds = {"code": pb.Exit.CODE, "signal": pb.Exit.SIGNAL, "unknown": pb.Exit.UNKNOWN}
    return pb.Exit(kind=kinds[end.kind], value=end.value, time_ns=end.time_ns)


def _key(rank: RankRecord) -> tuple[int, int]:
    return rank.generation, rank.rank


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
