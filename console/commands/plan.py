"""``everstep plan``: say what a job's checkpoints need, and how long saves and restarts take, before it starts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from console.commands.shared import JsonOption, finish, print_json
from everstep.decisions.sizing.load import FORWARD_SHARE, Load
from everstep.errors import ConfigError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.hardware import Hardware, source_of
from everstep.slots.checksum import MOST_THREADS

if TYPE_CHECKING:
    from pydantic import BaseModel

SETTINGS = (
    *("slots", "overlap", "save_every_steps", "backup", "backup_slots", "backup_every_steps", "backup_rate_mb_s"),
    *("backup_card_share", "transfer_connections"),
    *("disk", "disk_every_steps", "disk_every_min", "disk_keep", "remote_url", "remote_keep"),
)
"""The settings of the table ``[checkpoint]`` that a plan depends on, beside the size of the state."""
STEP_S = 10.0
TENSOR_MB = 32.0
UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+)", re.IGNORECASE)
Parameter = inspect.Parameter


def plan(**chosen: Any) -> None:
    """Say what a job's checkpoints need on each machine, and how long saves and restarts take. Nothing is started.

    The answer has four parts: memory, with the slots that fit; saves, with the time for which they delay training;
    traffic to peers, disks and remote storage; and the time of a restart, part by part. It is computed from the numbers
    at its end. They describe a node with 8 GPUs and 2 TB of memory, unless options replace them. With --measure, the
    numbers of this computer are measured: run the command on one of the machines. With --cluster, the machines of a
    cluster are asked for their free memory. docs/concepts/sizes.md explains each number.

    A job file gives machines, ranks_per_machine and the table checkpoint; its state_mb_per_rank is the size of the
    state. Options replace what it says.

    Examples:

        everstep plan --state 40GB --ranks-per-machine 8 --machines 16

        everstep plan job.toml --step-s 4

        everstep plan job.toml --measure --disk-folder /mnt/runs

        everstep plan --state 40GB --slots 3 --no-backup --json

    Exit codes: 0 the slots fit into the memory; 1 they do not; 2 wrong options or a wrong job file; 3 with --cluster:
    no cluster, no Temporal, or no machine answers.
    """
    finish(_plan(chosen))


async def _plan(chosen: Mapping[str, Any]) -> int:
    from console.views.plan import plan_json, plan_lines
    from everstep.decisions.sizing.plan import plan_job

    load, sources = await _load_of(chosen)
    planned = plan_job(load)
    if chosen["as_json"]:
        print_json(plan_json(load, planned, sources))
    else:
        print("\n".join(plan_lines(load, planned, sources)))
    return 1 if planned.refusal else 0


async def _load_of(chosen: Mapping[str, Any]) -> tuple[Load, dict[str, str]]:
    """The job to plan, and the source of each number of the machine.

    Raises:
        ConfigError: the size of the state is not known, or an option has a wrong value.
    """
    spec = None
    if chosen["job_file"] is not None:
        from controlplane.job_file.job_file import load_job

        spec = load_job(chosen["job_file"], recorded=True)  # a plan does not need the script
    of_file = spec.checkpoint if spec else CheckpointPolicy()
    policy = _checked(CheckpointPolicy, of_file.model_dump(), _given(chosen, SETTINGS))
    state = size_of("--state", chosen["state"]) if chosen["state"] else round(of_file.state_mb_per_rank * 1e6)
    if not state:
        place = f"checkpoint.state_mb_per_rank in {chosen['job_file']}" if spec else "--state"
        raise ConfigError(f"the size of a rank's state is not known: give {place}, e.g. --state 40GB")
    hardware, sources = await _hardware(chosen)
    return Load(
        state_bytes=state,
        ranks=chosen["ranks_per_machine"] or (spec.ranks_per_machine if spec else 8),
        machines=chosen["machines"] or (spec.machines if spec else 2),
        step_s=chosen["step_s"],
        policy=policy,
        hardware=hardware,
        hash_threads=chosen["hash_threads"],
        forward_share=chosen["forward_share"],
    ), sources


async def _hardware(chosen: Mapping[str, Any]) -> tuple[Hardware, dict[str, str]]:
    """The machine, and the source of each of its numbers."""
    given = _given(chosen, Hardware.model_fields)
    measured = _measured(chosen) if chosen["measure"] else {}
    least, source = await _least(chosen["cluster"]) if chosen["cluster"] else ({}, "")
    sources = {name: source_of(name) for name in Hardware.model_fields}
    sources |= dict.fromkeys(measured, "measured here") | dict.fromkeys(least, source) | dict.fromkeys(given, "given")
    return _checked(Hardware, measured | least, given), sources


def _measured(chosen: Mapping[str, Any]) -> dict[str, float]:
    from controlplane.measure import measure

    try:
        return measure(chosen["disk_folder"], tensor=round(chosen["tensor_mb"] * 1e6))
    except OSError as error:
        raise ConfigError(f"this computer cannot be measured: {error}. Give the numbers as options") from error


async def _least(cluster: str) -> tuple[dict[str, float], str]:
    """The least free memory of the machines of a cluster, and its source."""
    from controlplane.client import Control
    from controlplane.queries.rooms import smallest_room

    async with await Control.connect(cluster) as control:
        return await smallest_room(control.agents, control.machines)


def _given(chosen: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: chosen[name] for name in names if chosen[name] is not None}


def _checked(model: type[Any], values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """A model with values that options replace.

    Raises:
        ConfigError: an option has a wrong value; the message names each.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate({**values, **given})
    except ValidationError as error:
        wrong = [(str(detail["loc"][0]), detail["msg"]) for detail in error.errors()]
        texts = [f"{_option(name)} {given.get(name)}: {text[0].lower()}{text[1:]}" for name, text in wrong]
        raise ConfigError("; ".join(texts)) from error


def size_of(option: str, text: str) -> int:
    """The bytes of a size such as ``40GB``, ``512 MB`` or ``1.5GiB``.

    Raises:
        ConfigError: it is not a size; the message names the option.
    """
    found = SIZE.fullmatch(text.strip())
    if not found or found[2].lower() not in UNITS:
        raise ConfigError(f"{option} {text!r} is not a size: give a number and a unit, e.g. 40GB, 512MB or 1.5TiB")
    size = round(float(found[1]) * UNITS[found[2].lower()])
    if not size:
        raise ConfigError(f"{option} {text!r}: the state has at least one byte; give e.g. 40GB")
    return size


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(model: type[BaseModel], names: Any, panel: str) -> dict[str, Any]:
    """An option for each field. An option that is left out is None, since the model has the default."""
    options = {}
    for name in names:
        field = model.model_fields[name]
        is_switch = field.annotation is bool
        option = _option(name)
        options[name] = Annotated[
            field.annotation | None,  # type: ignore[operator]
            typer.Option(
                f"{option}/--no-{option[2:]}" if is_switch else option,
                help=f"{field.description} Default: {field.default}." if field.default != "" else field.description,
                show_default=False,
                rich_help_panel=panel,
            ),
        ]
    return options


def _signature() -> inspect.Signature:
    """The parameters of the command: its own options, and one for each field that a plan depends on."""
    own: dict[str, tuple[Any, Any]] = {
        "job_file": (
            Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="A job file.", show_default=False)],
            None,
        ),
        "state": (
            Annotated[
                str | None,
                typer.Option("--state", metavar="SIZE", help="State of one rank, e.g. 40GB.", show_default=False),
            ],
            None,
        ),
        "ranks_per_machine": (
            Annotated[
                int | None,
                typer.Option(min=1, help="Ranks on each machine. Default: the job file's, or 8.", show_default=False),
            ],
            None,
        ),
        "machines": (
            Annotated[
                int | None,
                typer.Option(min=1, help="Number of machines. Default: the job file's, or 2.", show_default=False),
            ],
            None,
        ),
        "step_s": (Annotated[float, typer.Option(min=0.001, help="Time of a step without saves, seconds.")], STEP_S),
        "forward_share": (
            Annotated[float, typer.Option(min=0.01, max=1, help="Share of a step before the call of optimizer.step.")],
            FORWARD_SHARE,
        ),
        "hash_threads": (
            Annotated[int, typer.Option(min=1, help="Threads that hash one slot, where there are cores for them.")],
            MOST_THREADS,
        ),
        "measure": (
            Annotated[bool, typer.Option("--measure", help="Measure this computer; takes some seconds.")],
            False,
        ),
        "cluster": (
            Annotated[
                str | None,
                typer.Option(
                    "--cluster",
                    metavar="NAME",
                    help="Use the free memory of the machines of this cluster; the one with the least counts.",
                    show_default=False,
                ),
            ],
            None,
        ),
        "disk_folder": (
            Annotated[Path, typer.Option(metavar="DIR", help="With --measure: a folder on the disk for checkpoints.")],
            Path(),
        ),
        "tensor_mb": (
            Annotated[float, typer.Option(min=0.001, help="With --measure: usual size of a tensor in a rank, MB.")],
            TENSOR_MB,
        ),
        "as_json": (JsonOption, False),
    }
    made = {
        **_options(CheckpointPolicy, SETTINGS, "The table [checkpoint]"),
        **_options(Hardware, Hardware.model_fields, "The machine"),
    }
    every = own | {name: (option, None) for name, option in made.items()}
    return inspect.Signature(
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option)
            for name, (option, default) in every.items()
        ]
    )


plan.__signature__ = _signature()  # type: ignore[attr-defined]
plan.__annotations__ = {}
