"""This module archives a job's step records: it copies them from the mapped report files to files that are kept longer.

Each rank has a file ``steps-<rank>.bin`` with records of fixed size, little endian: sequence u64 · generation u32 ·
given u32 · step i64 · time_ns i64 · loss f64 · grad_norm f64 · tokens i64. After a restart of the agent, copying
continues after the last record; if this record is incomplete, it is removed.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from agent.state.disk import append
from agent.v1 import agent_pb2 as pb
from everstep.errors import EverstepError
from everstep.rank.step_reports import ReportFile
from everstep.system import private_files as private

_RECORD = struct.Struct("<QIIqqddq")
REPLY_RECORDS = 1000


class StepArchive:
    """The step records of one job on this machine. One thread calls ``drain``; all other methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next: dict[int, tuple[int, int]] = {}
        self._tokens: dict[int, int] = {}

    def drain(self, report: ReportFile) -> int:
        """Append the records of a report file that the archive lacks; returns their number."""
        generation, start = self._position(report.rank)
        if generation > report.generation:
            return 0
        if generation < report.generation:
            start = 0
            self._tokens[report.rank] = 0
        upto, records = report.records(start)
        if not records:
            return 0
        first = upto - len(records)
        data = b"".join(
            _RECORD.pack(first + i, report.generation, r.given, r.step, r.time_ns, r.loss, r.grad_norm, r.tokens)
            for i, r in enumerate(records)
        )
        append(self._path(report.rank), data)
        self._next[report.rank] = (report.generation, upto)
        self._tokens[report.rank] += sum(r.tokens for r in records)
        return len(records)

    def tokens(self, rank: int, generation: int) -> int:
        """Return the sum of the tokens in the drained reports of a rank and generation; reads no file."""
        known, _ = self._next.get(rank, (0, 0))
        return self._tokens.get(rank, 0) if known == generation else 0

    def ranks(self) -> list[int]:
        """Return the ranks with records, ascending."""
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob("steps-*.bin"))

    def read(
        self, rank: int, from_step: int, version_of: Callable[[int], int] = lambda _: 0
    ) -> Iterator[pb.StepsReply]:
        """Yield the records of a rank with ``step >= from_step`` in portions, in the order of their reports.

        Args:
            rank: The rank.
            from_step: The first step.
            version_of: Returns the version of the job's code that a generation ran; 0: not known.
        """
        with contextlib.suppress(FileNotFoundError), self._path(rank).open("rb") as file:
            while data := file.read(REPLY_RECORDS * _RECORD.size):
                whole_records = data[: len(data) - len(data) % _RECORD.size]
                reply = pb.StepsReply(rank=rank)
                for _, generation, given, step, time_ns, loss, grad_norm, tokens in _RECORD.iter_unpack(whole_records):
                    if step >= from_step:
                        reply.records.add(
                            step=step,
                            generation=generation,
                            time_ns=time_ns,
                            loss=loss,
                            grad_norm=grad_norm,
                            tokens=tokens,
                            given=given,
                            version=version_of(generation),
                        )
                if reply.records:
                    yield reply

    def _position(self, rank: int) -> tuple[int, int]:
        """Return the generation and the sequence number from which draining continues."""
        if rank not in self._next:
            position, tokens = (0, 0), 0
            with contextlib.suppress(FileNotFoundError), self._path(rank).open("r+b") as file:
                size = file.seek(0, 2)
                complete = size - size % _RECORD.size
                file.truncate(complete)
                if complete:
                    file.seek(complete - _RECORD.size)
                    sequence, generation, *_ = _RECORD.unpack(file.read(_RECORD.size))
                    position = (generation, sequence + 1)
                    file.seek(0)
                    rows = _RECORD.iter_unpack(file.read(complete))
                    tokens = sum(row[7] for row in rows if row[1] == generation)
            self._tokens[rank] = tokens
            self._next[rank] = position
        return self._next[rank]

    def _path(self, rank: int) -> Path:
        return self._folder / f"steps-{rank}.bin"


class Reports:
    """The open report files of a job's newest generation, by rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, ReportFile] = {}

    def path(self, rank: int, generation: int) -> Path:
        """Return the path of a rank's report file."""
        return self._folder / f"report-{rank}-{generation}"

    def prepare(self, rank: int, generation: int, save_every: int) -> Path:
        """Make the report file of a rank that begins to save every ``save_every`` steps, if it does not exist."""
        path = self.path(rank, generation)
        private.make_folder(self._folder)
        if not path.exists():
            ReportFile.create(path, rank=rank, generation=generation, save_every=save_every)
        return path

    def get(self, rank: int, generation: int) -> ReportFile | None:
        """Return the report file of a rank; None: no file can be read."""
        found = self._open.get(rank)
        if found is None or found.generation != generation:
            try:
                opened = ReportFile.open(self.path(rank, generation))
            except (OSError, EverstepError):
                return None
            if found:
                found.close()
            self._open[rank] = found = opened
        return found

    def remove_before(self, generation: int) -> None:
        """Remove the report files of older generations."""
        for path in self._folder.glob("report-*"):
            *_, number = path.name.split("-")
            if number.isdecimal() and int(number) < generation:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all files."""
        for report in self._open.values():
            report.close()
        self._open.clear()
