"""This module tracks the ranks of one job on this machine, each from its fork until its end is reported."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from agent.jobs.host import Host
from agent.launcher.processes import End, EndingWatch, Watch, ending_of, kill_family
from agent.reporting import rank_logs
from agent.reporting.metrics import JobMetrics
from agent.reporting.paced_saves import order_of
from agent.reporting.step_archive import Reports, StepArchive
from agent.state.job_record import JobRecord, StoreRecord
from agent.state.rank_record import RankRecord, of_generation
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.save_pace import obeyed
from everstep.errors import AgentError
from everstep.rank import environment
from everstep.rank.step_reports import Snapshot
from everstep.system import private_files as private
from everstep.system.procfs import has_mapped, is_alive, start_ticks

PUSH_PATIENCE_S = 2.0
"""The fork server has this long to report that a rank has ended; then the agent reports it by itself, seconds."""
PENDING = -1
"""The ``sequence`` of a rank whose end must be reported, and whose observation has no number yet."""
OUTPUT_PATIENCE_S = 2.0
"""If reading a rank's output takes longer, its end is reported without the output, seconds."""

logger = structlog.get_logger()


class JobRanks:
    """The ranks in the job's record. The table of the fork server shows which ranks were forked.

    Args:
        host: The machine.
        record: The job's record; changed in place.
        server_lives: Returns whether the fork server lives. While it lives, it reports the ends of ranks.
    """

    def __init__(self, host: Host, record: JobRecord, server_lives: Callable[[], bool]) -> None:
        self.host = host
        self.record = record
        self.server_lives = server_lives
        self.folder = host.state_dir / "jobs" / record.job
        self.shm = host.shm_dir / record.job
        host.disk.run(("logs", record.job), lambda: private.make_folder(self.folder / "logs"))
        self.archive = StepArchive(self.folder)
        self.reports = Reports(self.shm)
        self.metrics = JobMetrics()
        self._drained = Reports(self.shm)
        """The report files that the disk's thread opens to drain them."""
        self._watches: dict[tuple[int, int], Watch] = {}
        """Generation and rank → the watch for its end."""
        self._endings: dict[tuple[int, int], EndingWatch] = {}
        """Generation and rank → the watch for the beginning of its end."""
        self.killed: dict[int, float] = {}
        """Pid of a killed process that still exists → time of the kill, monotonic seconds."""
        self.keeps_output = True
        """Whether the output of the newest launch's ranks is kept; False: the disk did not answer at the launch."""
        self._log = logger.bind(job=record.job)

    def record_rank(self, row: Mapping[str, Any]) -> RankRecord:
        """Record a rank of the fork server's table, and watch it."""
        found = self.record.find(row["generation"], row["rank"])
        if found is None:
            fields = ("rank", "generation", "pid", "start_ticks", "forked_ns")
            found = RankRecord(**{name: row[name] for name in fields})
            self.record.ranks.append(found)
        if found.end is None and _key(found) not in self._watches and not row.get("exit"):
            self.watch(found)
        return found

    def watch(self, rank: RankRecord) -> None:
        """Watch for the end of a rank, whether or not its fork server lives."""

        def noticed() -> None:
            self._watches.pop(_key(rank), None)
            self.host.spawn(self._gone(rank))

        if is_alive(rank.pid, rank.start_ticks):
            self.host.reaper.forget(rank.pid)
        self._watches[_key(rank)] = Watch(rank.pid, rank.start_ticks, noticed)
        report = self.reports.get(rank.rank, rank.generation)
        notice = report.end_notice() if report else None
        self._endings[_key(rank)] = EndingWatch(notice, lambda: self._begins_to_end(rank))

    def _begins_to_end(self, rank: RankRecord) -> None:
        """Report the end of a rank while its process still exists: the kernel may need minutes to free its memory.

        The record still shows the rank as living. So no new ranks are launched, and its memory is not read, before its
        process is gone.
        """
        end = ending_of(rank.pid, rank.start_ticks)
        if end is None or rank.end or rank.ending or rank.generation <= self.record.fenced or self.record.released:
            return  # the rank did not end by itself, or its end was reported already
        rank.ending, rank.sequence = end, PENDING
        self.save()
        self.drain()
        self.host.spawn(self._report_end(rank))

    async def _gone(self, rank: RankRecord) -> None:
        deadline = time.monotonic() + PUSH_PATIENCE_S
        while self.server_lives() and time.monotonic() < deadline:
            if rank.end:
                return
            await asyncio.sleep(0.01)
        if rank.end:
            return
        end = await self.host.reaper.end_of(rank.pid, rank.start_ticks)
        kill_family(rank.pid, rank.start_ticks, self.mark(rank))
        self.ended(rank, end)

    def exit_reported(self, row: Mapping[str, Any]) -> None:
        """Handle a fork server's report that a rank ended."""
        if row["rank"] < 0:
            return
        rank = self.record_rank(row)
        rank.stopped = rank.stopped or (row["stopped"] and not rank.ending)
        self.ended(rank, End(**row["exit"]))

    def ended(self, rank: RankRecord, end: End) -> None:
        """Record the end of a rank once, and report it unless a Stop caused it."""
        if rank.end:
            return
        if watch := self._watches.pop(_key(rank), None):
            watch.close()
        if ending := self._endings.pop(_key(rank), None):
            ending.close()
        self.killed.pop(rank.pid, None)
        is_news = rank.ending is None
        rank.end = rank.ending or end
        if is_news:
            rank.sequence = 0 if rank.stopped else PENDING
        self.save()
        self.drain()
        if is_news and rank.sequence == PENDING:
            self.host.spawn(self._report_end(rank))

    async def _report_end(self, rank: RankRecord) -> None:
        """Write the observation of a rank's end, with the error from the rank's output."""
        await self.describe_end(rank)
        if self.record.released or rank.sequence != PENDING:
            return
        # The record is saved first, with the number of the coming observation. If the agent is killed between the two
        # lines below, the next agent reports the end from the record. No end is reported twice.
        rank.sequence = self.host.log.last + 1
        self.save()
        self._log_end(rank)

    def _log_end(self, rank: RankRecord) -> None:
        ended = rank.end_message(self._snapshot(rank))
        self.host.log.append(job=self.record.job, generation=rank.generation, rank_ended=ended)

    async def describe_end(self, rank: RankRecord) -> pb.RankEnd:
        """Describe how a rank ended, with the last part of its output. The end is classified once, from this output."""
        output = await self._last_output(rank)
        rank.classify(output)
        return rank.end_message(self._snapshot(rank), output)

    def report_pending(self, newest: int) -> None:
        """Report recorded ends that a killed agent did not report; ``newest``: the last number in its log."""
        for rank in self.record.ranks:
            has_ended = rank.end or rank.ending
            if has_ended and rank.sequence == PENDING:
                self.host.spawn(self._report_end(rank))
            elif has_ended and rank.sequence > newest:
                rank.sequence = self.host.log.last + 1
                self._log_end(rank)
        self.save()

    def _snapshot(self, rank: RankRecord) -> Snapshot | None:
        """Return the progress of a rank; None: its report file is gone."""
        report = self.reports.get(rank.rank, rank.generation)
        return report.snapshot() if report else None

    async def _last_output(self, rank: RankRecord) -> bytes:
        """Return the last part of a rank's stderr; empty if the disk does not answer in time."""
        path = self.log_path(rank.rank, "err")
        try:
            text = await self.host.reads.do(lambda: rank_logs.tail(path, rank_logs.SEARCHED_BYTES), OUTPUT_PATIENCE_S)
        except (TimeoutError, OSError, AgentError) as error:
            self._log.error("the output of a rank cannot be read", rank=rank.rank, reason=str(error) or "no answer")
            return b""
        return of_generation(text, rank.generation)

    def log_path(self, rank: int, suffix: str) -> Path:
        """Return the path of a rank's captured output; suffix ``out`` or ``err``."""
        return self.folder / "logs" / f"rank-{rank}.{suffix}"

    def output_path(self, rank: int, suffix: str) -> Path:
        """Return the path for a new rank's output: /dev/null if the disk hangs, because the rank would hang too."""
        return self.log_path(rank, suffix) if self.keeps_output else Path(os.devnull)

    def find_orphans(self) -> None:
        """Record the ranks that a dead fork server forked but did not report; their report files show these ranks."""
        for path in self.shm.glob("report-*"):
            _, rank, generation = path.name.split("-")
            if not generation.isdecimal() or self.record.find(int(generation), int(rank)):
                continue  # the report file was never finished, or its rank is known
            report = self.reports.get(int(rank), int(generation))
            found = report.snapshot() if report else None
            if found and found.pid and has_mapped(found.pid, path):
                row = {
                    "rank": int(rank),
                    "generation": int(generation),
                    "pid": found.pid,
                    "start_ticks": start_ticks(found.pid),
                    "forked_ns": found.milestones["forked"],
                }
                self.record_rank(row)
        self.save()

    def forget_other_boots(self, boot: str) -> None:
        """Report the end of ranks that ran before the machine was rebooted; other processes may have their pids now."""
        before, self.record.boot = self.record.boot, boot
        if before == boot:
            return
        self._log.warning("the machine was rebooted: nothing of the job runs", before=before)
        self.record.fork_server_pid = self.record.fork_server_ticks = 0
        self.record.stores = []
        for rank in self.record.living():
            self.ended(rank, End("unknown", 0, time.time_ns()))

    def take_over(self, table: Mapping[str, Any]) -> None:
        """Update the record from the fork server's table."""
        for row in table["ranks"]:
            self.record_rank(row)
            if row["exit"]:
                self.exit_reported(row)
        for row in table["stores"]:
            if row["exit"] is None:
                self.record_store(row)
        self.record.generation = max([self.record.generation, *(r.generation for r in self.record.ranks)])

    def record_store(self, row: Mapping[str, Any]) -> StoreRecord:
        """Record a rendezvous store of the fork server's table."""
        store = StoreRecord(**{name: row[name] for name in ("generation", "pid", "start_ticks", "port")})
        if store not in self.record.stores:
            self.record.stores.append(store)
        return store

    def mark(self, rank: RankRecord) -> str:
        """Return the variable that is in the environment of a rank and of all processes that it started."""
        return f"{environment.REPORT_FILE}={self.reports.path(rank.rank, rank.generation)}"

    def drain(self) -> None:
        """Copy the step records of the newest generation to the disk in the background; returns at once."""
        ranks = [(rank.rank, rank.generation) for rank in self.record.of(self.record.generation)]
        self.host.disk.run(("steps", self.record.job, self.record.generation), lambda: self._drain(ranks))

    def _drain(self, ranks: list[tuple[int, int]]) -> None:
        """Copy the step records; runs in the disk's thread."""
        for rank, generation in ranks:
            if report := self._drained.get(rank, generation):
                self.archive.drain(report)

    def pace_saves(self, request: pb.PaceSavesRequest) -> None:
        """Ask the ranks of a generation to move to another pace."""
        order = order_of(request)
        for rank in self.record.living():
            report = self.reports.get(rank.rank, request.generation) if rank.generation == request.generation else None
            if report:
                report.ask_pace(obeyed(rank.rank, report.asked_pace(), order))

    def save_every(self, generation: int) -> int:
        """Return after how many steps the ranks of a generation save; 0: their report files are gone."""
        ranks = self.record.of(generation)
        reports = [report for rank in ranks if (report := self.reports.get(rank.rank, generation))]
        return max((report.pace().every for report in reports), default=0)

    def report_metrics(self) -> None:
        """Report each jump and decline of the ranks' metrics once."""
        for rank in self.record.of(self.record.generation):
            if report := self.reports.get(rank.rank, rank.generation):
                for text in self.metrics.new_changes(report):
                    noted = pb.MetricNoted(rank=rank.rank, text=text)
                    self.host.log.append(job=self.record.job, generation=rank.generation, metric_noted=noted)

    def save(self) -> None:
        """Save the record; this neither waits nor fails."""
        self.host.records.keep(self.record)

    def close(self) -> None:
        """Stop watching; the ranks continue to run."""
        for watch in self._watches.values():
            watch.close()
        for ending in self._endings.values():
            ending.close()


def _key(rank: RankRecord) -> tuple[int, int]:
    return rank.generation, rank.rank
