"""Checks, before a job starts from a checkpoint, whether every rank can restore it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from everstep.decisions.keep.starts import choose_start, folder_of
from everstep.errors import CheckpointError, ConfigError
from everstep.model.job_state import EarlierRun
from everstep.model.state_copy import StateCopies, Tier

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.job import JobSpec
    from everstep.model.job_state import JobState
    from everstep.model.machine import Machine


NAMED = 8
"""At most this many machines are named; the rest are counted."""
LATEST: Literal["latest"] = "latest"


async def earlier_run(control: Control, spec: JobSpec) -> JobState | None:
    """The state of the last run with the job's name; None: Temporal has no such run.

    Raises:
        ConfigError: that run has not ended, or its checkpoints are for other parallel sizes.
        ClusterError: Temporal or its workers do not answer.
    """
    from everstep.errors import NoSuchJob

    try:
        state = await control.state(spec.name)
    except NoSuchJob:
        return None
    if (await control.run_of(spec.name)).running:
        raise ConfigError(f"job {spec.name} is running: end it first with 'everstep stop {spec.name}{control.option}'")
    before, now = state.spec.topology(), spec.topology()
    if not now.same_numbering(str(before)):
        raise ConfigError(
            f"the checkpoints of job {spec.name} were saved with other sizes: {before}, and now it has {now} "
            "(machines, ranks on each, then tp, pp, order or the axes). Start it with its former sizes, or start it "
            "from a checkpoint's folder on disk with --resume-path"
        )
    return state


def parse_step(text: str) -> int | Literal["latest"]:
    """Parse the step of ``--resume-from``.

    Raises:
        ConfigError: it is neither a number of 1 or more nor ``latest``.
    """
    if text == LATEST:
        return LATEST
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ConfigError(f"--resume-from {text} is not a step: give a number of 1 or more, or '{LATEST}'")
    return int(text)


def as_earlier(state: JobState) -> EarlierRun:
    """The facts about an earlier run that decide which copies are its own."""
    return EarlierRun(run=state.run, origin_runs=state.origin_runs, lineage=state.lineage)


async def check_step(
    control: Control,
    spec: JobSpec,
    machines: Sequence[Machine],
    step: int | Literal["latest"],
    last_run: EarlierRun | None = None,
) -> tuple[int, str]:
    """Check that every rank can restore a step; returns the step, and where its copies are, as text.

    Args:
        control: Connection to the cluster.
        spec: The job.
        machines: The machines on which it will run.
        step: The step from which it starts.
        last_run: The last run with its name; None: Temporal has no such run.

    Raises:
        ConfigError: a rank cannot restore it (the message lists the existing steps), or the latest step is not known,
            since a machine is silent or storage cannot be listed.
    """
    from controlplane.queries.checkpoints import ask_for_copies
    from everstep.base.text import listed

    held, silent = await ask_for_copies(control.agents, spec, machines)
    silent_text = f"; {listed(silent, NAMED)} does not answer" if silent else ""
    if step == LATEST and silent:
        raise ConfigError(
            f"the latest step of job {spec.name} is not known{silent_text}. Start the agent again, or name a step "
            f"('everstep checkpoints {spec.name}{control.option}' lists them)"
        )
    try:
        at = None if step == LATEST else step
        assignment = spec.assignment([machine.name for machine in machines])
        restore, _ = choose_start(held, assignment, last_run or EarlierRun(), at=at)
    except CheckpointError as error:
        raise ConfigError(f"job {spec.name} cannot start from there: {error}{silent_text}") from error
    if step == LATEST and (unknown := unlisted(held)):
        newest = f". The newest step elsewhere is {restore.step}" if restore.step > 0 else ""
        raise ConfigError(
            f"the latest step of job {spec.name} is not known: {unknown[0]}{newest}. Make the storage available again, "
            f"or name a step ('everstep checkpoints {spec.name}{control.option}' lists them)"
        )
    if restore.step < 1:
        raise ConfigError(
            f"job {spec.name} has no step to continue from: {restore.reason}. Without --resume-from it starts at step 0"
        )
    return restore.step, restore.reason


def unlisted(held: Sequence[StateCopies]) -> list[str]:
    """Why disks or remote storage could not be listed; for remote storage, the listing by one machine is enough."""
    remote = any(copy.tier is Tier.REMOTE and not copy.unlisted for copy in held)
    return [copy.reason for copy in held if copy.unlisted and not (remote and copy.tier is Tier.REMOTE)]


def checked_path(path: Path) -> str:
    """The absolute path of a checkpoint's folder. Whether the machines have it is checked when the job starts.

    Raises:
        ConfigError: its name is not that of a checkpoint.
    """
    absolute = os.path.abspath(path.expanduser())  # noqa: PTH100 - keeps links, which may differ on machines
    if folder_of(absolute) is None:
        raise ConfigError(
            f"--resume-path {path} is not the folder of a checkpoint: name one such as /disk/gpt/step-000000120"
        )
    return absolute
