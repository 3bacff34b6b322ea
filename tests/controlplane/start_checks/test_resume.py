"""Starting from a checkpoint: what cannot be restored is refused before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.v1 import agent_pb2 as pb
from controlplane.references import JobRun
from controlplane.start_checks.resume import as_earlier, check_step, checked_path, earlier_run, parse_step
from everstep.errors import AgentUnreachable, ConfigError, NoSuchJob
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine

SPEC = JobSpec(name="gpt", script="/gpt.py", machines=2, ranks_per_machine=1)
MACHINES = [Machine(name=f"m{index}", address=f"a{index}") for index in range(2)]


@dataclass
class FakeControl:
    """A control plane that knows at most one job; each of its machines holds its own rank's steps on disk."""

    known: JobState | None = None
    status: str = "completed"
    steps: dict[str, list[int]] = field(default_factory=dict)
    option: str = ""
    generations: dict[tuple[str, int], int] = field(default_factory=dict)
    """That saved the step of a machine, in the run that is known."""
    unlisted: dict[str, str] = field(default_factory=dict)
    """Why a machine cannot list its disk."""

    @property
    def agents(self) -> Any:
        return SimpleNamespace(get=lambda address: SimpleNamespace(checkpoints=self._answer(address)))

    def _answer(self, address: str) -> Any:
        async def checkpoints(request: pb.CheckpointsRequest, *, timeout_s: float) -> pb.CheckpointsReply:
            if address not in self.steps:
                raise AgentUnreachable("away")
            rank, tier = int(address[1:]), pb.HeldCheckpoint.DISK
            return pb.CheckpointsReply(
                checkpoints=[
                    pb.HeldCheckpoint(
                        rank=rank,
                        completed_steps=step,
                        valid=True,
                        tier=tier,
                        place=f"/{step}/{rank}",
                        run=self.known.run if self.known else "",
                        generation=self.generations.get((address, step), 1),
                    )
                    for step in self.steps[address]
                ]
                + [
                    pb.HeldCheckpoint(
                        rank=0, completed_steps=-1, reason=self.unlisted[address], tier=tier, place="m:/d"
                    )
                    for _ in self.unlisted.get(address, "")[:1]
                ]
            )

        return checkpoints

    async def state(self, job: str) -> JobState:
        if self.known is None:
            raise NoSuchJob(job)
        return self.known

    async def run_of(self, job: str) -> JobRun:
        return JobRun(job, self.status, datetime.now(timezone.utc), None)  # noqa: UP017 - as the client gives it


async def test_the_last_run_of_the_name_is_found() -> None:
    state = JobState(spec=SPEC, machines=MACHINES)

    assert await earlier_run(FakeControl(state), SPEC) is state  # type: ignore[arg-type]


async def test_a_run_that_temporal_has_forgotten_is_no_obstacle() -> None:
    assert await earlier_run(FakeControl(), SPEC) is None  # type: ignore[arg-type]


async def test_a_running_job_is_not_started_again() -> None:
    with pytest.raises(ConfigError, match="job gpt is running: end it first with 'everstep stop gpt'"):
        await earlier_run(FakeControl(JobState(spec=SPEC, machines=MACHINES), "running"), SPEC)  # type: ignore[arg-type]


async def test_checkpoints_of_other_sizes_are_not_taken_for_ones_of_these() -> None:
    other = SPEC.model_copy(update={"ranks_per_machine": 2, "tp": 2})

    with pytest.raises(ConfigError, match="saved with other sizes: 2,2,2,1,pp-dp-tp then and 2,1,1,1,pp-dp-tp now"):
        await earlier_run(FakeControl(JobState(spec=other, machines=MACHINES)), SPEC)  # type: ignore[arg-type]


async def test_a_step_that_all_ranks_have_will_do() -> None:
    control = FakeControl(steps={"a0": [10, 20], "a1": [10]})

    step, said = await check_step(control, SPEC, MACHINES, 10)  # type: ignore[arg-type]

    assert step == 10
    assert said.startswith("step 10 is the one asked for, which all 2 ranks can restore: all 2 from disk")


async def test_a_step_that_some_rank_lacks_is_refused_with_what_exists() -> None:
    control = FakeControl(steps={"a0": [10, 20], "a1": [10]})

    with pytest.raises(
        ConfigError, match="step 20 cannot be restored by all 2 ranks: rank 1 lacks it; there are steps 10"
    ):
        await check_step(control, SPEC, MACHINES, 20)  # type: ignore[arg-type]


async def test_the_latest_is_the_newest_that_all_ranks_have() -> None:
    control = FakeControl(steps={"a0": [10, 20, 30], "a1": [10, 20]})

    step, said = await check_step(control, SPEC, MACHINES, "latest")  # type: ignore[arg-type]

    assert step == 20
    assert said.startswith("step 20 is the latest that all 2 ranks can restore: all 2 from disk")


async def test_what_the_last_run_had_disowned_is_not_gone_on_from() -> None:
    """A machine could not set its files of step 20 aside when the job went back to 10."""
    state = JobState(spec=SPEC, machines=MACHINES, run="20261121-1", lineage=[(1, -1), (2, 10)])
    control = FakeControl(state, steps={"a0": [10, 20], "a1": [10, 20]}, generations={("a0", 20): 2})

    with pytest.raises(ConfigError, match="rank 1 lacks it; there are steps 10"):
        await check_step(control, SPEC, MACHINES, 20, as_earlier(state))  # type: ignore[arg-type]


async def test_there_is_no_latest_where_no_step_is_complete() -> None:
    with pytest.raises(ConfigError, match=r"has no step to go on from: no step is held by all ranks: .* lacks rank"):
        await check_step(FakeControl(steps={"a0": [20], "a1": [10]}), SPEC, MACHINES, "latest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no step to go on from: no rank holds a checkpoint"):
        await check_step(FakeControl(steps={"a0": [], "a1": []}), SPEC, MACHINES, "latest")  # type: ignore[arg-type]


async def test_nobody_knows_the_latest_while_a_machine_is_silent() -> None:
    with pytest.raises(ConfigError, match="not known; m1 does not answer: bring its agent back, or name a step"):
        await check_step(FakeControl(steps={"a0": [10]}), SPEC, MACHINES, "latest")  # type: ignore[arg-type]


async def test_nobody_knows_the_latest_while_a_disk_cannot_be_listed() -> None:
    control = FakeControl(steps={"a0": [10, 20], "a1": [10]}, unlisted={"a1": "/mnt/runs cannot be listed: no answer"})

    with pytest.raises(
        ConfigError, match="/mnt/runs cannot be listed: no answer: the newest that can be seen is step 10"
    ):
        await check_step(control, SPEC, MACHINES, "latest")  # type: ignore[arg-type]
    assert (await check_step(control, SPEC, MACHINES, 10))[0] == 10  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "step"), [("1", 1), ("120", 120), ("latest", "latest")])
def test_a_step_is_a_number_or_the_latest(text: str, step: object) -> None:
    assert parse_step(text) == step


@pytest.mark.parametrize("text", ["", "0", "-3", "last", "1.5", "٣"])
def test_what_names_no_step_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no step: give its number, from 1 on, or latest"):
        parse_step(text)


def test_a_folder_becomes_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert checked_path(Path("gpt/step-000000120")) == str(tmp_path / "gpt" / "step-000000120")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a checkpoint: name one such as .*/step-000000120"):
        checked_path(tmp_path)
