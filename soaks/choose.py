"""Chooses the plan of a soak and the folder of its journal."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from controlplane.local.cluster_file import everstep_home
from drills.faults.all import fault_named
from everstep.errors import CannotInject, ConfigError
from soaks.draw import draw, left_out
from soaks.plan import Sizes, SoakPlan
from soaks.runner import PLAN

SEEDS = 1_000_000
"""A random seed is below this number."""


def chosen(
    *,
    faults: int,
    seed: int | None,
    only: Sequence[str],
    sizes: Mapping[str, int],
    plan: Path | None,
    resume: Path | None,
    folder: Path | None,
) -> tuple[SoakPlan, Path]:
    """Return the plan and the folder of a soak: those of an earlier soak, or a plan from a file, or a newly drawn plan.

    Raises:
        ConfigError: the options make no sense.
        CannotInject: no soak draws one of the kinds in ``only``.
    """
    if resume:
        if not (resume / PLAN).exists():
            raise ConfigError(f"{resume} is not the folder of a soak: it has no {PLAN}")
        return SoakPlan.read(resume / PLAN), resume
    if plan:
        soak_plan = SoakPlan.read(plan)
        soak_plan.check()
    else:
        for name in only:
            fault_named(name)
            if reason := left_out().get(name):
                raise CannotInject(f"{name}: no soak draws it: {reason}")
        try:
            soak_plan = draw(secrets.randbelow(SEEDS) if seed is None else seed, faults, _sizes(sizes), only)
        except ValidationError as error:
            raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    default = everstep_home() / "soaks" / f"{soak_plan.seed}-{soak_plan.faults}"
    return soak_plan, _unused(folder or default, chosen=folder is not None)


def _sizes(values: Mapping[str, int]) -> Sizes:
    if values["machines"] < 2:
        raise ConfigError("--machines 1: a soak needs two machines or more, so that there are backups")
    return Sizes(**values)


def _unused(folder: Path, *, chosen: bool) -> Path:
    """Return a folder without a soak, so that no earlier soak is resumed by mistake."""
    if not (folder / PLAN).exists():
        return folder
    if chosen:
        raise ConfigError(f"{folder} has a soak already: resume it with --resume {folder}, or name another folder")
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free
