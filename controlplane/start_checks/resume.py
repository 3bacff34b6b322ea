"""Starting a job from a checkpoint on purpose: is it there, before anything is started?"""

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
"""Machines that are named; the others are counted."""
LATEST: Literal["latest"] = "latest"


async def earlier_run(control: Control, spec: JobSpec) -> JobState | None:
    """What the last run of the job's name knows of itself; None when Temporal knows none.

    Raises:
        ConfigError: it still runs, or it had other parallel sizes, to which its checkpoints belong.
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
    if not now.numbers_alike(str(before)):
        raise ConfigError(
            f"the checkpoints of job {spec.name} were saved with other sizes: {before} then and {now} now "
            "(machines, ranks on each, then tp, pp, order or the axes). Start it with the sizes that it had, or from a "
            "folder of a checkpoint on disk: --resume-path"
        )
    return state


def parse_step(text: str) -> int | Literal["latest"]:
    """The step that a person names.

    Raises:
        ConfigError: it is neither a number from 1 on nor ``latest``.
    """
    if text == LATEST:
        return LATEST
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ConfigError(f"--resume-from {text} is no step: give its number, from 1 on, or {LATEST}")
    return int(text)


def as_earlier(state: JobState) -> EarlierRun:
    """Which copies a run took for its own."""
    return EarlierRun(run=state.run, origin_runs=state.origin_runs, lineage=state.lineage)


async def check_step(
    control: Control,
    spec: JobSpec,
    machines: Sequence[Machine],
    step: int | Literal["latest"],
    last_run: EarlierRun | None = None,
) -> tuple[int, str]:
    """Look whether every rank can restore a step; returns the step and from where, for people.

    Args:
        control: Of the cluster.
        spec: The job.
        machines: Where it is going to run.
        step: From which it is to start.
        last_run: The last run of its name; None: Temporal knows none.

    Raises:
        ConfigError: not every rank can, says which steps exist; or the latest is not known, since a machine is silent
            or storage cannot be listed.
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
    """Why disks or remote storage could not be listed; of the latter it suffices that one machine could."""
    remote = any(copy.tier is Tier.REMOTE and not copy.unlisted for copy in held)
    return [copy.reason for copy in held if copy.unlisted and not (remote and copy.tier is Tier.REMOTE)]


def checked_path(path: Path) -> str:
    """The absolute path of the folder of one disk checkpoint; that the machines see it is checked when the job starts.

    Raises:
        ConfigError: it is none by its name.
    """
    absolute = os.path.abspath(path.expanduser())  # noqa: PTH100 - links stay: machines may resolve them otherwise
    if folder_of(absolute) is None:
        raise ConfigError(
            f"--resume-path {path} is not the folder of a checkpoint: name one such as /disk/gpt/step-000000120"
        )
    return absolute
