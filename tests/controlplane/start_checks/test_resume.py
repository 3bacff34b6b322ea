"""A job that starts from a checkpoint: a step that cannot be restored is refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.references import JobRun
from controlplane.start_checks.resume import as_earlier, check_step, checked_path, earlier_run, parse_step
from everstep.errors import AgentUnreachable, ConfigError, NoSuchJob
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from tests.activities.spoken import reached

SPEC = JobSpec(name="gpt", script="/gpt.py", machines=2, ranks_per_machine=1)
DISK = pb.HeldCheckpoint.DISK
MACHINES = [Machine(name=f"m{index}", address=f"a{index}") for index in range(2)]


@dataclass
class FakeControl:
    """A control plane that knows at most one job."""

    known: JobState | None = None
    status: str = "completed"
    option: str = ""

    async def state(self, job: str) -> JobState:
        if self.known is None:
            raise NoSuchJob(job)
        return self.known

    async def run_of(self, job: str) -> JobRun:
        return JobRun(job, self.status, datetime.now(timezone.utc), None)  # noqa: UP017 - Temporal's client gives this type


async def checked(
    step: Any,
    steps: Sequence[list[int] | None],
    *,
    earlier: JobState | None = None,
    newer: tuple[int, int] = (-1, -1),
    unlisted: str = "",
) -> tuple[int, str]:
    """Check a step from which a job is to start.

    Args:
        step: The step, or "latest".
        steps: For each of two machines, the steps of its own rank on its disk; None: its agent does not answer.
        earlier: The last run of the name, which saved all these steps.
        newer: A rank and its step that the second generation saved. The first generation saved all others.
        unlisted: Why the last machine cannot list its disk to the end.
    """

    def on_disk(rank: int, steps: list[int]) -> list[pb.HeldCheckpoint]:
        return [
            pb.HeldCheckpoint(
                rank=rank,
                completed_steps=step,
                valid=True,
                tier=DISK,
                place=f"/{step}/{rank}",
                run=earlier.run if earlier else "",
                generation=2 if (rank, step) == newer else 1,
            )
            for step in steps
        ]

    replies = [pb.CheckpointsReply(checkpoints=on_disk(rank, known or [])) for rank, known in enumerate(steps)]
    if unlisted:
        replies[-1].checkpoints.add(rank=0, completed_steps=-1, reason=unlisted, tier=DISK, place="m:/d")
    away = AgentUnreachable("away")
    agents = [FakeAgent(checkpoints=away if known is None else one) for known, one in zip(steps, replies, strict=True)]
    async with reached(agents) as (pool, machines):
        control: Any = SimpleNamespace(agents=pool, option="")
        return await check_step(control, SPEC, machines, step, as_earlier(earlier) if earlier else None)


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

    with pytest.raises(ConfigError, match="saved with other sizes: 2,2,2,1,pp-dp-tp, and now it has 2,1,1,1,pp-dp-tp"):
        await earlier_run(FakeControl(JobState(spec=other, machines=MACHINES)), SPEC)  # type: ignore[arg-type]


async def test_a_step_that_all_ranks_have_will_do() -> None:
    step, said = await checked(10, [[10, 20], [10]])

    assert step == 10
    assert said.startswith("step 10 was requested, and all 2 ranks can restore: all 2 from disk")


async def test_a_step_that_some_rank_lacks_is_refused_with_what_exists() -> None:
    with pytest.raises(
        ConfigError, match="step 20 cannot be restored by all 2 ranks: rank 1 lacks it; there are steps 10"
    ):
        await checked(20, [[10, 20], [10]])


async def test_the_latest_is_the_newest_that_all_ranks_have() -> None:
    step, said = await checked("latest", [[10, 20, 30], [10, 20]])

    assert step == 20
    assert said.startswith("step 20 is the latest step that all 2 ranks can restore: all 2 from disk")


async def test_what_the_last_run_had_disowned_is_not_gone_on_from() -> None:
    """A machine could not set its files of step 20 aside when the job went back to 10."""
    state = JobState(spec=SPEC, machines=MACHINES, run="20261121-1", lineage=[(1, -1), (2, 10)])

    with pytest.raises(ConfigError, match="rank 1 lacks it; there are steps 10"):
        await checked(20, [[10, 20], [10, 20]], earlier=state, newer=(0, 20))


async def test_there_is_no_latest_where_no_step_is_complete() -> None:
    with pytest.raises(ConfigError, match=r"no step has a copy of every rank: .* lacks rank"):
        await checked("latest", [[20], [10]])
    with pytest.raises(ConfigError, match="has no step to continue from: no rank has a checkpoint"):
        await checked("latest", [[], []])


async def test_nobody_knows_the_latest_while_a_machine_is_silent() -> None:
    with pytest.raises(ConfigError, match=r"not known; m1 does not answer\. Start the agent again, or name a step"):
        await checked("latest", [[10], None])


async def test_nobody_knows_the_latest_while_a_disk_cannot_be_listed() -> None:
    steps, unlisted = [[10, 20], [10]], "/mnt/runs cannot be listed: no answer"

    with pytest.raises(ConfigError, match=r"/mnt/runs cannot be listed: no answer\. The newest step elsewhere is 10"):
        await checked("latest", steps, unlisted=unlisted)
    assert (await checked(10, steps, unlisted=unlisted))[0] == 10


@pytest.mark.parametrize(("text", "step"), [("1", 1), ("120", 120), ("latest", "latest")])
def test_a_step_is_a_number_or_the_latest(text: str, step: object) -> None:
    assert parse_step(text) == step


@pytest.mark.parametrize("text", ["", "0", "-3", "last", "1.5", "٣"])
def test_what_names_no_step_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a step: give a number of 1 or more, or 'latest'"):
        parse_step(text)


def test_a_folder_becomes_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert checked_path(Path("gpt/step-000000120")) == str(tmp_path / "gpt" / "step-000000120")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a checkpoint: name one such as .*/step-000000120"):
        checked_path(tmp_path)
