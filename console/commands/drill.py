"""``everstep drill``: inject a real fault and judge the recovery.

Each fault is a command; its options are made from the fields of the fault's model.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from everstep.errors import CannotInject, ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

EXIT_NOT_RECOVERED, EXIT_CANNOT_INJECT, EXIT_NOT_COMPARED = 1, 3, 4
OF_THE_DRILL = {
    "script": Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS…]", help="Script with its arguments. Default: the example GPT.", show_default=False
        ),
    ],
    "repeat": Annotated[
        int,
        typer.Option(
            min=1, help="Number of runs on one cluster; then median, p90 and maximum are shown.", show_default=False
        ),
    ],
    "keep": Annotated[bool, typer.Option("--keep", help="Leave the cluster up, so that its incidents can be read.")],
    "as_json": Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --repeat it has all runs and a summary.")
    ],
}
"""Options that belong neither to the fault nor to the job."""
Parameter = inspect.Parameter


class Faults(TyperGroup):
    """A command group with one command for each fault."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all faults, in the order of ``FAULTS``."""
        from drills.faults.all import FAULTS

        return [fault.name for fault in FAULTS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a fault as the help lists it: one line, without options."""
        from drills.faults.all import fault_named

        return TyperCommand(cmd_name, help=fault_named(cmd_name).summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a fault; with ``--during`` it also has the options of the fault that this option names."""
        return args[0], command_of(args[0], args[1:]), args[1:]


drill = typer.Typer(cls=Faults, add_completion=False, rich_markup_mode="markdown")


@drill.callback(invoke_without_command=True, subcommand_metavar="FAULT [OPTIONS] [-- SCRIPT ARGS…]")
def every_drill(
    ctx: typer.Context,
    list_faults: Annotated[bool, typer.Option("--list", help="List all faults with their options.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as JSON.")] = False,
) -> None:
    """Run a job, inject a real fault, and judge the recovery.

    `everstep drill FAULT --help` shows the options of a fault and of the job.

    The job runs on its own local cluster, which is removed afterwards together with its ledger. With --keep the cluster
    stays up, and the last lines show the commands to read its incidents. The same job also runs without the fault: in
    both runs, the losses of all steps and the last state of every rank must be equal bit for bit. If the script reports
    no losses and has no checkpoint, nothing can be compared, and the result shows that. No process and no file may be
    left behind, and no rank may ever run twice at the same time. In a script's arguments `{run}` stands for a separate
    folder for each run, for checkpoints that the script writes itself.

    If a drill removes or damages copies of the training state, it inspects the remaining copies itself, and derives how
    many steps may be lost: at most one step, if the placement of the backups guarantees that. Drills with small file
    systems need root, and so do drills of the network, in which machines are network namespaces with TLS.

    Examples:

        everstep drill kill-rank --rank 5 --at-step 20

        everstep drill kill-rank --rank 1 --rank 6 --repeat 10

        everstep drill kill-group --kind pp --index 0 --keep

        everstep drill kill-machine --machine m2 --gone

        everstep drill machine-fault --machine m1 --reason disk-failed

        everstep drill hang-agents --machines 10 --ranks-per-machine 1 --count 3 --seconds 20

        everstep drill flip-bit --where backup --rank 5

        everstep drill kill-worker --in-stage restore --during kill-machine --machine m2

        everstep drill link-down --machine m2 --seconds 10

        everstep drill exit-rank --code 0 --json -- examples/ddp_plain.py --out '{run}'

    Exit codes: 0 the fault was injected, and the recovery was as expected; 1 otherwise; 2 wrong usage; 3 this fault
    cannot be injected here; 4 like 0, but nothing could be compared with the run without the fault.
    """
    if list_faults:
        from console.views import drill as view

        view.catalogue(as_json=as_json)
    elif ctx.invoked_subcommand is None:
        raise ConfigError("name a fault: 'everstep drill --list' shows all faults")


def command_of(name: str, arguments: list[str]) -> Any:
    """The command that drills a fault, with the options of the fault and of the job.

    Raises:
        ConfigError: there is no such fault.
    """
    from drills.faults.all import fault_named
    from drills.faults.control_plane import ControlFault
    from drills.spec.job_options import JobOptions

    fault = fault_named(name)
    options = dict(_options(fault, f"Options of {name}"))
    if issubclass(fault, ControlFault):
        during = _value_of("--during", arguments) or "kill-rank"
        options["during"] = Annotated[
            str,
            typer.Option(
                metavar="FAULT",
                show_default=False,
                help="The fault that opens the incident; its options are accepted too. Default: kill-rank.",
                rich_help_panel=f"Options of {name}",
            ),
        ]
        options = dict(_options(fault_named(during), f"Options of {during}")) | options
    options |= dict(_options(JobOptions, "The job")) | OF_THE_DRILL

    def run(**chosen: Any) -> None:
        # An option that was left out is None, False or empty; 0 is a value.
        _drill(name, {key: value for key, value in chosen.items() if value or (value == 0 and value is not False)})

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=option) for key, option in options.items()]
    )
    run.__annotations__ = {}
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name, help=f"{fault.summary[0].upper()}{fault.summary[1:]}.")(run)
    return typer.main.get_command(single)


def _options(model: type[BaseModel], panel: str) -> Iterator[tuple[str, Any]]:
    """Pairs of a field's name and its option. An option that is left out is None, since the model has the default."""
    from drills.faults.all import choices_of, option_of, shown_options

    for name, field in shown_options(model):
        choices = choices_of(field)
        inner = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        is_optional = len(inner) == 1 and get_origin(field.annotation) is not list
        kind: Any = Literal[choices] if choices else inner[0] if is_optional else field.annotation
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        is_chosen = field.is_required() or field.default_factory is not None or field.default in (None, "", False)
        option = typer.Option(
            option_of(name, field),
            help=field.description if is_chosen else f"{field.description} Default: {field.default}.",
            metavar=str(extra["metavar"]) if "metavar" in extra else None,
            show_default=False,
            rich_help_panel=panel,
        )
        yield name, Annotated[kind, option]


def _value_of(option: str, arguments: list[str]) -> str:
    """The value of an option in unparsed arguments; empty: the option is absent."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return ""


def _drill(fault: str, chosen: dict[str, Any]) -> None:
    from console.views import drill as view
    from drills import interrupts
    from drills.faults.all import drill_request
    from drills.runner import run_drills
    from drills.verdict import merged

    repeat, keep, as_json = chosen.pop("repeat", 1), chosen.pop("keep", False), chosen.pop("as_json", False)
    try:
        request = drill_request(fault, **chosen)
        results = interrupts.run(run_drills(request, repeat=repeat, say=view.progress, keep=keep, each=view.each))
    except CannotInject as refused:
        if as_json:
            print(json.dumps({"fault": fault, "fired": False, "refused": str(refused)}))
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(EXIT_CANNOT_INJECT) from None
    if as_json:
        print(json.dumps(merged(results) if repeat > 1 else results[0].model_dump(), indent=2))
    else:
        view.results(results)
    if not all(result.ok for result in results):
        raise typer.Exit(EXIT_NOT_RECOVERED)
    not_compared = [result for result in results if not result.compared and result.resolution != "parked"]
    raise typer.Exit(EXIT_NOT_COMPARED if not_compared else 0)
