"""Runs the ranks of an example as real processes. They are started as agents start them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controlplane.local.ports import Claims
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile
from everstep.shards.file import write_shard
from everstep.shards.folders import step_folder
from everstep.slots.reader import SlotReader, held

ROOT = Path(__file__).parents[2]


class Job:
    """A job with a few ranks on this machine. Each ``launch`` runs one generation."""

    def __init__(
        self,
        shm: Path,
        forker: subprocess.Popen[str],
        script: str,
        args: list[str],
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        mesh: str = "",
    ) -> None:
        self.shm, self.forker = shm, forker
        self.script, self.args = str(ROOT / "examples" / script), args
        self.tp, self.pp, self.world = tp, pp, tp * pp * dp
        self.topology = f"{self.world},1,{mesh or f'{tp},{pp},pp-dp-tp'}"
        self.plan = shm / "faults.json"
        self.extra: dict[str, str] = {}
        """More environment variables for all ranks."""
        self.generation = 0
        self.pids: list[int] = []
        self.losses: dict[tuple[int, int], str] = {}
        """(Rank, step) → the newest reported loss, as a hexadecimal float."""

    def inject(self, **fault: Any) -> None:
        """Plan one fault for the next launches."""
        self.plan.write_text(json.dumps([{"id": "only", **fault}]))

    def agreed_step(self) -> int:
        """Return the newest step that all ranks hold. 0: there is none."""
        steps = [{s.completed_steps for s in held(self.shm / f"checkpoint-{r}") if s.valid} for r in range(self.world)]
        return max(set.intersection(*steps), default=0)

    def to_disk(self, step: int) -> Path:
        """Write the states of all ranks to disk, as agents do. Returns the folder of the step."""
        folder = step_folder(self.shm / "disk", "job", step)
        for rank in range(self.world):
            reader = SlotReader(self.shm / f"checkpoint-{rank}")
            header = reader.header(step)
            assert header is not None
            read = partial(reader.read_into, header)
            write_shard(folder, owner=reader.owner, topology=self.topology, header=header, read=read)
            reader.close()
        return folder

    def launch(self, resume: int = 0) -> list[int]:
        """Run one generation to its end. If a rank fails, the others are killed. Returns the exit codes."""
        self.generation += 1
        with Claims() as claims:
            return self._launch(claims.choose("127.0.0.1").port, resume)

    def _launch(self, port: int, resume: int) -> list[int]:
        reports = [
            ReportFile.create(self.shm / f"report-{rank}-{self.generation}", rank=rank, generation=self.generation)
            for rank in range(self.world)
        ]
        environments = [self._environment(rank, port, resume) for rank in range(self.world)]
        assert self.forker.stdin is not None and self.forker.stdout is not None
        print(
            json.dumps({"script": self.script, "args": self.args, "environments": environments}),
            file=self.forker.stdin,
            flush=True,
        )
        self.pids = json.loads(self.forker.stdout.readline())
        codes: list[int] = json.loads(self.forker.stdout.readline())
        for report in reports:
            for record in report.records(0)[1]:
                self.losses[report.rank, record.step] = record.loss.hex()
            report.close()
        return codes

    def _environment(self, rank: int, port: int, resume: int) -> dict[str, str]:
        ours = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": self.world,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            environment.REPORT_FILE: self.shm / f"report-{rank}-{self.generation}",
            environment.CHECKPOINT_FILE: self.shm / f"checkpoint-{rank}",
            environment.RESUME_STEP: resume,
            environment.GENERATION: self.generation,
            environment.TOPOLOGY: self.topology,
            environment.FAULTS: self.plan,
        }
        return {name: str(value) for name, value in ours.items()} | self.extra


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def forker() -> Iterator[subprocess.Popen[str]]:
    """A process that forks the ranks of jobs."""
    command = [sys.executable, str(Path(__file__).with_name("forker.py"))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture
def make_job(shm: Path, forker: subprocess.Popen[str]) -> Callable[..., Job]:
    """Return a function that makes a ``Job``: ``make_job(script, args, tp=…, pp=…, dp=…)``."""

    def make(script: str, args: list[str], **sizes: Any) -> Job:
        return Job(Path(tempfile.mkdtemp(dir=shm)), forker, script, args, **sizes)

    return make
