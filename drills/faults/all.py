"""The list of all faults, and drills made from names."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo

from drills.faults import agents, away, damaged_copies, devices, full, hangs, lost_machines, not_finite, slow, updates
from drills.faults.control_plane import ControlFault, KillTemporal, KillWorker
from drills.faults.exit_rank import ExitRank
from drills.faults.fault import Fault
from drills.faults.kill_during_save import KillDuringSave
from drills.faults.kill_rank import KillRank
from drills.faults.out_of_memory import OutOfMemory
from drills.faults.raise_exception import RaiseException
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
    KillTemporal,
    KillDuringSave,
    devices.XidFault,
    devices.GpuLost,
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
    """The fault of a name.

    Raises:
        ConfigError: there is no such fault.
    """
    fault = _BY_NAME.get(name)
    if fault is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see 'everstep drill --list'"
        raise ConfigError(f"no fault is called {name!r}: {hint}")
    return fault


def make_fault(name: str, options: Mapping[str, Any]) -> Fault:
    """A fault with its options.

    Raises:
        ConfigError: there is no such fault, or an option or its value is wrong.
    """
    kind = fault_named(name)
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(_in_words(kind, error)) from error


def drill_request(fault: str, **options: Any) -> DrillRequest:
    """Make a drill from the names of the command line: options of the fault and of the job.

    If the fault strikes within the incident of another fault, ``during`` names the other fault, and options that the
    first fault does not have go to the other.

    Raises:
        ConfigError: an option makes no sense.
    """
    kind = fault_named(fault)
    job = {name: value for name, value in options.items() if name in JobOptions.model_fields}
    own = {name: value for name, value in options.items() if name not in job}
    if issubclass(kind, ControlFault):
        opening = fault_named(own.pop("during", "") or KillRank.name)
        if issubclass(opening, ControlFault):
            raise ConfigError(f"--during {opening.name} opens no incident that anything could strike in")
        inner = {name: own.pop(name) for name in opening.model_fields.keys() & own.keys() - kind.model_fields.keys()}
        own["opened_by"] = make_fault(opening.name, inner)
    made = make_fault(fault, own)
    try:
        return DrillRequest(fault=made, **job)
    except ValidationError as error:
        raise ConfigError(_in_words(JobOptions, error)) from error


def _parsed(value: Any) -> Any:
    """Parse a fault from an object with its name and options; errors are of the kind that pydantic collects."""
    if not isinstance(value, Mapping):
        return value
    try:
        return make_fault(str(value.get("fault", "")), {key: one for key, one in value.items() if key != "fault"})
    except ConfigError as error:
        raise ValueError(str(error)) from error


AnyFault = Annotated[
    Fault,
    BeforeValidator(_parsed),
    PlainSerializer(lambda fault: {"fault": fault.name, **fault.model_dump(exclude_unset=True, exclude={"opened_by"})}),
]
"""Any fault, as JSON: an object with its name as ``fault``, and the chosen options."""


def option_of(name: str, field: FieldInfo) -> str:
    """The command-line option of a field."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return str(extra.get("option", f"--{name.replace('_', '-')}"))


def is_hidden(field: FieldInfo) -> bool:
    """Whether a field has no command-line option."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("hidden"))


def shown_options(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """The fields with a command-line option; those that choose the target are first."""
    first = ("ranks", "machine")
    shown = [(name, field) for name, field in model.model_fields.items() if not is_hidden(field)]
    return sorted(shown, key=lambda option: option[0] not in first)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The possible values of a field, if they are a list."""
    named = get_origin(field.annotation) is not None and all(isinstance(one, str) for one in get_args(field.annotation))
    return tuple(one for one in get_args(field.annotation) if one) if named else ()


def usage_of(fault: type[Fault]) -> str:
    """The options of a fault in one line: ``--machine M [--gone]``."""
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
    """The first error in options, in the words of the command line."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        others = [one.name for one in FAULTS if name in one.model_fields]
        option = f"--{name.replace('_', '-')}"
        where = f": it goes with {', '.join(others)}" if others else ""
        return f"{option} does not go with {getattr(kind, 'name', 'a drill')}{where}"
    field = kind.model_fields.get(name)
    option = option_of(name, field) if field else name
    listed = f": use one of {', '.join(choices_of(field))}" if field and choices_of(field) else ""
    if first["type"] == "missing":
        return f"{option} is missing{listed}"
    wrong = first["msg"].removeprefix("Value error, ")
    return f"{option} {first['input']}{listed or f': {wrong}'}"
