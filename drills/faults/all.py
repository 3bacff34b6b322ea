"""The list of all faults, and requests of drills made from the names of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo

from drills.faults import agents, away, damaged_copies, devices, full, hangs, lost_machines, not_finite, slow, updates
from drills.faults.control_plane import ControlFault, DrainWorker, KillTemporal, KillWorker
from drills.faults.fault import Fault
from drills.faults.out_of_memory import OutOfMemory
from drills.faults.rank_ends import ExitRank, KillDuringSave, KillRank, RaiseException
from drills.spec.job_options import JobOptions
from drills.spec.request import DrillRequest
from everstep.errors import ConfigError

FAULTS: tuple[type[Fault], ...] = (
    KillRank,
    hangs.StopRank,
    ExitRank,
    RaiseException,
    hangs.Spin,
    hangs.Deadlock,
    hangs.SkipCollective,
    hangs.HangDataloader,
    hangs.WrongOrder,
    not_finite.Nan,
    not_finite.MachineBitflip,
    slow.SlowMachine,
    slow.UnevenWork,
    lost_machines.KillMachine,
    lost_machines.KillGroup,
    agents.KillAgent,
    agents.KillForkServer,
    KillWorker,
    DrainWorker,
    KillTemporal,
    KillDuringSave,
    devices.XidFault,
    devices.GpuLost,
    devices.GpuStuck,
    devices.MachineFault,
    devices.GpuHot,
    devices.NicDown,
    devices.NicFlap,
    devices.SwitchDown,
    full.DiskFull,
    devices.ReadOnly,
    OutOfMemory,
    away.LinkDown,
    away.CutOff,
    away.KillPostgres,
    away.KillWorkers,
    away.FreezeWorkers,
    away.CutLink,
    slow.SlowLink,
    updates.BadVersion,
    updates.Update,
    damaged_copies.FlipBit,
    damaged_copies.TruncateFile,
    full.MemoryFull,
    agents.HangPeer,
    agents.HangAgents,
    agents.KillPeer,
)
"""All faults, in the order in which ``everstep drill --list`` shows them."""
_BY_NAME = {fault.name: fault for fault in FAULTS}


def fault_named(name: str) -> type[Fault]:
    """Return the fault with this name.

    Raises:
        ConfigError: there is no such fault.
    """
    fault = _BY_NAME.get(name)
    if fault is None:
        similar = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else "see 'everstep drill --list'"
        raise ConfigError(f"no fault is called {name!r}: {hint}")
    return fault


def make_fault(name: str, options: Mapping[str, Any]) -> Fault:
    """Make a fault with these options.

    Raises:
        ConfigError: there is no such fault or option, or a value is wrong.
    """
    kind = fault_named(name)
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(_in_words(kind, error)) from error


def drill_request(fault: str, **options: Any) -> DrillRequest:
    """Make the request of a drill.

    Args:
        fault: Name of the fault.
        options: Options of the fault and of the job. If the fault strikes the control plane, ``during`` names another
            fault, which opens the incident. Options that only that other fault has are given to it.

    Raises:
        ConfigError: there is no such fault or option, or a value is wrong.
    """
    kind = fault_named(fault)
    job = {name: value for name, value in options.items() if name in JobOptions.model_fields}
    own = {name: value for name, value in options.items() if name not in job}
    if issubclass(kind, ControlFault):
        opening = fault_named(own.pop("during", "") or KillRank.name)
        if issubclass(opening, ControlFault):
            raise ConfigError(f"--during {opening.name} opens no incident in which another fault could strike")
        inner = {name: own.pop(name) for name in opening.model_fields.keys() & own.keys() - kind.model_fields.keys()}
        own["opened_by"] = make_fault(opening.name, inner)
    made = make_fault(fault, own)
    try:
        return DrillRequest(fault=made, **job)
    except ValidationError as error:
        raise ConfigError(_in_words(JobOptions, error)) from error


def _parsed(value: Any) -> Any:
    """Make a fault from an object with its name and options; raises ValueError, which pydantic collects."""
    if not isinstance(value, Mapping):
        return value
    try:
        return make_fault(str(value.get("fault", "")), {key: option for key, option in value.items() if key != "fault"})
    except ConfigError as error:
        raise ValueError(str(error)) from error


AnyFault = Annotated[
    Fault,
    BeforeValidator(_parsed),
    PlainSerializer(lambda fault: {"fault": fault.name, **fault.model_dump(exclude_unset=True, exclude={"opened_by"})}),
]
"""A field with any fault. In JSON it is an object with the fault's name as ``fault``, and the chosen options."""


def option_of(name: str, field: FieldInfo) -> str:
    """Return the command-line option of a field, such as ``--at-step``."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return str(extra.get("option", f"--{name.replace('_', '-')}"))


def is_hidden(field: FieldInfo) -> bool:
    """Return whether a field has no command-line option."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("hidden"))


def shown_options(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Return the fields with a command-line option. Those that choose the target come first."""
    first = ("ranks", "machine")
    shown = [(name, field) for name, field in model.model_fields.items() if not is_hidden(field)]
    return sorted(shown, key=lambda option: option[0] not in first)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the values among which the user of a field chooses; empty: any value is possible."""
    values = get_args(field.annotation)
    is_choice = get_origin(field.annotation) is not None and all(isinstance(value, str) for value in values)
    return tuple(value for value in values if value) if is_choice else ()


def usage_of(fault: type[Fault]) -> str:
    """Return the options of a fault in one line, such as ``--machine M [--gone]``."""
    return " ".join(_usage(fault))


def _usage(fault: type[Fault]) -> Iterator[str]:
    for name, field in shown_options(fault):
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        value = "|".join(choices_of(field)) or str(extra.get("metavar", name.upper()))
        text = option_of(name, field) if field.annotation is bool else f"{option_of(name, field)} {value}"
        text += " …" if get_origin(field.annotation) is list else ""
        yield text if field.is_required() else f"[{text}]"
    if issubclass(fault, ControlFault):
        yield "[--during FAULT …]"


def _in_words(kind: type[Fault] | type[JobOptions], error: ValidationError) -> str:
    """Return the first error in some options, in the words of the command line."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        having = [fault.name for fault in FAULTS if name in fault.model_fields]
        option = f"--{name.replace('_', '-')}"
        where = f": it is an option of {', '.join(having)}" if having else ""
        return f"{option} is no option of {getattr(kind, 'name', 'a drill')}{where}"
    field = kind.model_fields.get(name)
    option = option_of(name, field) if field else name
    listed = f": use one of {', '.join(choices_of(field))}" if field and choices_of(field) else ""
    if first["type"] == "missing":
        return f"{option} is missing{listed}"
    wrong = first["msg"].removeprefix("Value error, ")
    return f"{option} {first['input']}{listed or f': {wrong}'}"
