"""This module has the agent's gRPC service: commands for jobs, queries, and streams of reports.

The rpcs for copies, code and diagnoses are in the other files of this folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator

import grpc
import structlog

import everstep
from agent.diagnoser.kind import hardware
from agent.jobs.job_runner import JobRunner, is_stopped, run_in_memory
from agent.jobs.variables import read_variables
from agent.launcher.fork_client import ForkServerClient
from agent.monitor.monitor import MOST_REPORTED, Monitor
from agent.reporting import rank_logs
from agent.reporting.observations import finding_message
from agent.server.code_service import CodeService
from agent.server.diagnose_service import DiagnoseService
from agent.server.job_registry import Context, JobRegistry
from agent.setup.checks import SetupChecks
from agent.state.job_record import JobRecord
from agent.state.live import FOLDER as LIVE
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError
from everstep.model.finding import together
from everstep.model.run_id import is_older
from everstep.system.memory import free, memory_available
from everstep.system.procfs import boot_id, is_alive

PROGRESS_FLOOR_S = 0.01
PROGRESS_CEILING_S = 1.0
STOPPED_S = 0.1
"""A rank whose process is stopped is reported within this time, seconds."""
ROOM_PATIENCE_S = 0.1
CLEAR_S = 10.0
"""The longest time that a Clear waits until the inspections have run again, seconds."""
STEPS_PATIENCE_S = 5.0
"""The longest time that Steps waits until the newest step records are on disk, seconds."""

logger = structlog.get_logger()


class AgentService(DiagnoseService, CodeService):
    """The rpcs of a machine's agent."""

    def __init__(self, jobs: JobRegistry, monitor: Monitor) -> None:
        super().__init__(jobs)
        self._monitor = monitor
        self._setup = SetupChecks(self.host.address, self.host.shm_dir, self.host.exchange.reach)
        self._disk_free = 0
        self._hardware = ""
        # This runs in a thread, because a driver may hang. Until the driver answers, the hardware is not known.
        threading.Thread(target=self._read_hardware, name="hardware", daemon=True).start()

    def _read_hardware(self) -> None:
        self._hardware = hardware()

    # The start of the agent.

    async def recover(self) -> int:
        """Adopt the processes of an earlier agent; returns the number of adopted ranks."""
        newest_reported = self.host.log.restored
        for record in self.host.records.load():
            self.jobs.runners[record.job] = JobRunner(self.host, record)
            self.host.records.begin(record)
        servers = await self.host.fork_servers.adopt(lambda server: self.host.spawn(self._answered(server)))
        adopted = len(self._living(servers))
        self.host.log.append(agent_started=pb.AgentStarted(adopted_ranks=adopted, pid=os.getpid()))
        for job, server in servers.items():
            if job not in self.jobs.runners:
                self._rebuild(server)
        for job, runner in self.jobs.runners.items():
            runner.ranks.report_pending(newest_reported)
            if runner.record.released:
                continue
            runner.ranks.forget_other_boots(boot_id())
            if job in servers:
                runner.attach(servers.pop(job))
            runner.ranks.find_orphans()
            for rank in runner.record.living():
                runner.ranks.watch(rank)
            await runner.resume_checkpoints()
            if runner.server is None and runner.record.prepared and not runner.server_is_silent():
                self.host.spawn(runner.ensure_server())
            runner.ranks.drain()
            runner.ranks.save()
        for server in servers.values():
            await server.end()
        self._sweep()
        return adopted

    def _rebuild(self, server: ForkServerClient) -> JobRunner:
        """Rebuild a job's record from its fork server, with the running processes and the fence."""
        logger.warning("rebuilding a job's record from its fork server", job=server.job, pid=server.pid)
        run = run_in_memory(self.host.shm_dir / server.job)
        record = JobRecord(job=server.job, run=run, boot=boot_id(), prepared=True, fenced=server.table["fenced"])
        runner = self.jobs.runners[server.job] = JobRunner(self.host, record)
        return runner

    async def _answered(self, server: ForkServerClient) -> None:
        """Handle the answer of a fork server that was silent when this agent started."""
        runner = self.jobs.runners.get(server.job) if server.job else None
        if server.job and runner is None:
            runner = self._rebuild(server)
        if runner is None or runner.record.released or runner.server:
            await self.host.fork_servers.keep_or_end(server)
            return
        async with runner.lock:
            if runner.server is None:
                runner.attach(server)
                runner.ranks.find_orphans()
                runner.ranks.save()

    def _living(self, servers: dict[str, ForkServerClient]) -> set[int]:
        """Return the pids of running ranks in the fork servers' tables and the records."""
        in_tables = {row["pid"] for server in servers.values() for row in server.table["ranks"] if not row["exit"]}
        records = [runner.record for runner in self.jobs.runners.values() if not runner.record.released]
        in_records = [rank for record in records for rank in record.living()]
        return in_tables | {rank.pid for rank in in_records if is_alive(rank.pid, rank.start_ticks)}

    def _sweep(self) -> None:
        """Free the shared memory of jobs that are no longer on this machine."""
        kept = {job for job, runner in self.jobs.runners.items() if not runner.record.released}
        for path in self.host.shm_dir.iterdir():
            if path.name not in {*kept, LIVE}:
                logger.warning("removing shared memory that no job owns", path=str(path))
                shutil.rmtree(path, ignore_errors=True)

    # Commands.

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: N802
        """Describe this machine and the jobs on it."""
        reply = pb.DescribeReply(
            machine=self.host.machine,
            version=everstep.__version__,
            started_ns=self.jobs.started_ns,
            pid=os.getpid(),
            room=await self._room(),
            data_addresses=self.host.exchange.addresses(),
            hardware=self._hardware,
            no_backups=self.host.exchange.cards.why_not,
            cards_without_speed=self.host.exchange.cards.without_speed,
        )
        if (servers := self.host.fork_servers).prewarm:
            warm = servers.warm
            reply.warm.ready, reply.warm.problem = warm is not None, servers.problem
            reply.warm.libraries.update(warm.libraries if warm else {})
        for job, runner in self.jobs.runners.items():
            record = runner.record
            if record.released:
                continue
            server, ranks = runner.server, runner.progress()
            runner.checkpoints.place.saved.set_ages(ranks)
            reply.jobs.add(
                job=job,
                run=record.run,
                generation=record.generation,
                fork_server_pid=server.pid if server and not server.lost else 0,
                ranks=ranks,
                libraries=server.libraries if server and not server.lost else {},
            )
        reply.time_ns = time.time_ns()
        return reply

    async def _room(self) -> pb.Room:
        """Return the free memory and disk space; if the disk hangs, the last known number is returned."""
        self.host.disk.run("room", self._measure_disk)
        await self.host.disk.flush(ROOM_PATIENCE_S)
        return pb.Room(shm_free=free(self.host.shm_dir), memory_available=memory_available(), disk_free=self._disk_free)

    def _measure_disk(self) -> None:
        self._disk_free = free(self.host.state_dir)

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:  # noqa: N802
        """Start the job's fork server."""
        runner = self.jobs.runners.get(request.job)
        if runner is None or runner.record.released:
            self.jobs.memory.forget(request.job)  # the replies belong to an earlier job of this name

        async def carry_out() -> pb.PrepareReply:
            await asyncio.to_thread(read_variables, request.env_from, request.env_file, self.host.machine)
            runner = self.jobs.new_runner(request.job, request.run)
            async with runner.lock:
                runner.check_present()
                record = runner.record
                lives = runner.server is not None and not runner.server.lost
                wanted = (request.python, dict(request.env))
                if lives and (record.python, record.env) != wanted:
                    if record.living():
                        raise AgentError(f"{request.job} runs with another interpreter or environment: stop it first")
                    await runner.end_server()
                record.python, record.env = wanted
                record.prepared = True
                runner.ranks.save()
                before = runner.server
                server = await runner.ensure_server()
                reused = server is before
                return pb.PrepareReply(
                    fork_server_pid=server.pid,
                    reused=reused,
                    seconds=0.0 if reused else server.seconds,
                    libraries=server.libraries,
                )

        return await self.jobs.command("Prepare", request, pb.PrepareReply, context, carry_out)

    async def StartStore(self, request: pb.StartStoreRequest, context: Context) -> pb.StartStoreReply:  # noqa: N802
        """Start the rendezvous store of a generation."""

        async def carry_out() -> pb.StartStoreReply:
            runner = self.jobs.runner(request.job)
            async with runner.lock:
                store = await runner.start_store(request)
            return pb.StartStoreReply(host=self.host.address, port=store.port, pid=store.pid)

        return await self.jobs.command("StartStore", request, pb.StartStoreReply, context, carry_out)

    async def Launch(self, request: pb.LaunchRequest, context: Context) -> pb.LaunchReply:  # noqa: N802
        """Start this machine's ranks of a generation."""
        program = request.program

        async def carry_out() -> pb.LaunchReply:
            runner = self.jobs.runner(request.job)
            await self.jobs.end_others_than(request.job)
            values = await asyncio.to_thread(read_variables, program.env_from, program.env_file, self.host.machine)
            complete = pb.LaunchRequest()
            complete.CopyFrom(request)
            complete.program.env.update({name: value for name, value in values.items() if name not in program.env})
            with self.host.code.kept(program.code):
                if program.code:
                    complete.program.script = str(await self.host.code.script(program.code, program.script))
                async with runner.lock:
                    await self.diagnoser.end("ranks are started")
                    ranks = await runner.launch(complete)
            started = [pb.RankProcess(rank=r.rank, pid=r.pid, forked_ns=r.forked_ns) for r in ranks]
            return pb.LaunchReply(generation=request.generation, ranks=started)

        return await self.jobs.command("Launch", request, pb.LaunchReply, context, carry_out)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:  # noqa: N802
        """Kill and fence generations; return the evidence and the checkpoints."""

        async def carry_out() -> pb.StopReply:
            runner = self.jobs.new_runner(request.job, request.run)  # an unknown job gets its fence too
            async with runner.lock:
                unknown = runner.is_unknown()
                ranks = await runner.stop(request.generation, request.grace_s)
                verify_bytes = request.verify_bytes if request.HasField("verify_bytes") else None
                checkpoints = await self.copies_after_stop(runner, verify_bytes)
            ends = await asyncio.gather(*map(runner.ranks.describe_end, ranks))
            return pb.StopReply(
                ranks=ends,
                checkpoints=checkpoints,
                unknown=unknown,
                disk_asked=runner.checkpoints.disk_asked,
                findings=self._findings(),
                save_every=runner.ranks.save_every(request.generation),
            )

        reply = await self.jobs.command("Stop", request, pb.StopReply, context, carry_out)
        reply.now_ns = time.time_ns()  # the current time, even if this is a remembered reply
        return reply

    def _findings(self) -> list[pb.Finding]:
        """Return the active findings of the inspections, the worst first."""
        return [finding_message(finding) for finding in self._monitor.findings()[:MOST_REPORTED]]

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:  # noqa: N802
        """End the job on this machine."""

        async def carry_out() -> pb.ReleaseReply:
            runner = self.jobs.runners.get(request.job)
            if runner is None or runner.record.released:
                return pb.ReleaseReply()
            if request.run and is_older(request.run, runner.record.run):
                return pb.ReleaseReply()  # the data of that run was removed when the newer run started
            return pb.ReleaseReply(bytes_freed=await self.jobs.release(runner))

        return await self.jobs.command("Release", request, pb.ReleaseReply, context, carry_out)

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:  # noqa: N802
        """Return the newest results of all inspections; the call starts no inspection."""
        states = self._monitor.states()
        return pb.InspectReply(
            machine=self.host.machine,
            time_ns=time.time_ns(),
            verdict=together(state.verdict for state in states),
            inspections=[state.message() for state in states],
        )

    async def CheckSetup(self, request: pb.CheckSetupRequest, context: Context) -> pb.CheckSetupReply:  # noqa: N802
        """Check what this agent needs of its machine or container."""
        checks = await self._setup.run(request.peer, request.address)
        return pb.CheckSetupReply(machine=self.host.machine, checks=checks)

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearReply:  # noqa: N802
        """Forget events and baselines; a fault that still exists is detected again at once."""
        cleared = self._monitor.clear(request.reason)
        await self._monitor.cleared(CLEAR_S)
        return pb.ClearReply(cleared=cleared)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: Context) -> pb.AcknowledgeReply:  # noqa: N802
        """Forget observations."""
        self.host.log.acknowledge(request.up_to_sequence, request.job)
        return pb.AcknowledgeReply()

    # Streams.

    async def Observe(self, request: pb.ObserveRequest, context: Context) -> AsyncIterator[pb.Observation]:  # noqa: N802
        """Stream the kept observations, then new ones."""
        active = self._findings if request.active_findings else tuple
        async for observation in self.host.log.follow(request.after_sequence, request.job, active):
            yield observation

    async def Progress(self, request: pb.ProgressRequest, context: Context) -> AsyncIterator[pb.ProgressReply]:  # noqa: N802
        """Stream the progress of each rank, at each change and once a second."""
        interval = min(max(request.interval_s, PROGRESS_FLOOR_S), PROGRESS_CEILING_S)
        sent, sent_at = b"", 0.0
        while True:
            runner = self.jobs.runners.get(request.job)
            reply = pb.ProgressReply()
            if runner:
                reply.generation = runner.record.generation
                reply.ranks.extend(runner.progress())
            state = reply.SerializeToString(deterministic=True)
            if state != sent or time.monotonic() - sent_at >= PROGRESS_CEILING_S:
                sent, sent_at = state, time.monotonic()
                reply.time_ns = time.time_ns()
                if runner:
                    runner.checkpoints.place.saved.set_ages(reply.ranks)
                yield reply
            await self._until_shown(runner, reply, interval)

    async def _until_shown(self, runner: JobRunner | None, shown: pb.ProgressReply, interval_s: float) -> None:
        """Wait until progress is to be sent again: after an interval, or at once if a rank's process is stopped."""
        until = time.monotonic() + interval_s
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, STOPPED_S))
            if runner is None or left_s <= STOPPED_S:
                continue
            running = {rank.rank for rank in shown.ranks if rank.alive and not rank.stopped}
            now = runner.record.of(runner.record.generation)
            if any(rank.rank in running and rank.end is None and is_stopped(rank) for rank in now):
                return

    async def Steps(self, request: pb.StepsRequest, context: Context) -> AsyncIterator[pb.StepsReply]:  # noqa: N802
        """Stream step records of a rank, or of all ranks."""
        runner = await self.jobs.known(request.job, context)
        runner.ranks.drain()
        await self.host.disk.flush(STEPS_PATIENCE_S)
        archive, version_of = runner.ranks.archive, runner.record.version_of
        for rank in archive.ranks() if request.rank < 0 else [request.rank]:
            for reply in archive.read(rank, request.from_step, version_of):
                yield reply

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> AsyncIterator[pb.LogChunk]:  # noqa: N802
        """Stream the captured output of a rank."""
        runner = await self.jobs.known(request.job, context)
        names = {pb.ReadLogRequest.STDOUT: "out", pb.ReadLogRequest.STDERR: "err"}
        wanted = {
            stream: runner.ranks.log_path(request.rank, suffix)
            for stream, suffix in names.items()
            if request.stream in (pb.ReadLogRequest.BOTH, stream)
        }
        has_log = await self.host.reads.do(lambda: any(rank_logs.kept_files(path) for path in wanted.values()))
        if not has_log and not request.follow:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"rank {request.rank} of {request.job} has no log on {self.host.machine}"
            )
        async for chunk in rank_logs.read_log(wanted, request.tail_bytes, request.follow, self.host.reads):
            yield chunk
