"""Checks before a job starts from a checkpoint: whether every rank can restore it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from everstep.decisions.keep.starts import choose_start, folder_of
from everstep.errors import CheckpointError, ConfigError
from everstep.model.job_state import EarlierRun
from everstep.model.state_copy import StateCopy, Tier

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
        ConfigError: it still runs, or its checkpoints are for other parallel sizes.
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
            f"the checkpoints of job {spec.name} were saved with other sizes: {before} then and {now} now "
            "(machines, ranks on each, then tp, pp, order or the axes). Start it with the sizes that it had, or from a "
            "folder of a checkpoint on disk: --resume-path"
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
        raise ConfigError(f"--resume-from {text} is no step: give its number, from 1 on, or {LATEST}")
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
    """Check that every rank can restore a step; returns the step and its source as text.

    Args:
        control: Connection to the cluster.
        spec: The job.
        machines: The machines on which it will run.
        step: The step from which it starts.
        last_run: The last run with its name; None: Temporal has no such run.

    Raises:
        ConfigError: a rank cannot (the message lists the steps that exist), or the latest step is not known, since a
            machine is silent or storage cannot be listed.
    """
    from controlplane.queries.checkpoints import ask_for_copies
    from everstep.base.text import listed

    held, silent = await ask_for_copies(control.agents, spec, machines)
    silent_text = f"; {listed(silent, NAMED)} does not answer" if silent else ""
    if step == LATEST and silent:
        raise ConfigError(
            f"which step of job {spec.name} is the latest is not known{silent_text}: bring its agent back, or name a "
            f"step ('everstep checkpoints {spec.name}{control.option}' lists them)"
        )
    try:
        at = None if step == LATEST else step
        assignment = spec.assignment([machine.name for machine in machines])
        restore, _ = choose_start(held, assignment, last_run or EarlierRun(), at=at)
    except CheckpointError as error:
        raise ConfigError(f"job {spec.name} cannot start from there: {error}{silent_text}") from error
    if step == LATEST and (unknown := unlisted(held)):
        seen_text = f": the newest that can be seen is step {restore.step}" if restore.step > 0 else ""
        raise ConfigError(
            f"which step of job {spec.name} is the latest is not known, {unknown[0]}{seen_text}. Bring it back, or "
            f"name a step ('everstep checkpoints {spec.name}{control.option}' lists them)"
        )
    if restore.step < 1:
        raise ConfigError(
            f"job {spec.name} has no step to go on from: {restore.reason}. Without --resume-from it starts anew"
        )
    return restore.step, restore.reason


def unlisted(held: Sequence[StateCopy]) -> list[str]:
    """Why disks or remote storage could not be listed; for remote storage the listing of one machine is enough."""
    remote = any(copy.tier is Tier.REMOTE and not copy.unlisted for copy in held)
    return [copy.reason for copy in held if copy.unlisted and not (remote and copy.tier is Tier.REMOTE)]


def checked_path(path: Path) -> str:
    """The absolute path of a checkpoint's folder; whether the machines see it is checked when the job starts.

    Raises:
        ConfigError: its name is not that of a checkpoint.
    """
    absolute = os.path.abspath(path.expanduser())  # noqa: PTH100 - links stay: machines may resolve them otherwise
    if folder_of(absolute) is None:
        raise ConfigError(
            f"--resume-path {path} is not the folder of a checkpoint: name one such as /disk/gpt/step-000000120"
        )
    return absolute
