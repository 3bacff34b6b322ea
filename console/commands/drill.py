"""``everstep drill``: a game day. Each fault is a command with options of its own, made from its model."""

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

EXIT_NOT_RECOVERED, EXIT_USAGE, EXIT_CANNOT, EXIT_NOT_COMPARED = 1, 2, 3, 4
OF_THE_DRILL = {
    "script": Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SCRIPT ARGS…]", help="Default: the example GPT.", show_default=False),
    ],
    "repeat": Annotated[
        int, typer.Option(min=1, help="So many runs on one cluster; then median, p90, maximum.", show_default=False)
    ],
    "keep": Annotated[bool, typer.Option("--keep", help="Leave the cluster up: its incidents can be read.")],
    "as_json": Annotated[bool, typer.Option("--json", help="One JSON object; with --repeat also runs and summary.")],
}
"""Options that belong neither to the fault nor to the job."""
Parameter = inspect.Parameter


class Faults(TyperGroup):
    """A command group with one command for each fault."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all faults, in the order of the list."""
        from drills.faults.all import FAULTS

        return [fault.name for fault in FAULTS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a fault as one line of the help, without options."""
        from drills.faults.all import fault_named

        return TyperCommand(cmd_name, help=fault_named(cmd_name).summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a fault; with ``--during`` it has the options of that fault too."""
        return args[0], command_of(args[0], args[1:]), args[1:]


drill = typer.Typer(cls=Faults, add_completion=False, rich_markup_mode="markdown")


@drill.callback(invoke_without_command=True, subcommand_metavar="FAULT [OPTIONS] [-- SCRIPT ARGS…]")
def every_drill(
    ctx: typer.Context,
    list_faults: Annotated[bool, typer.Option("--list", help="List all faults with their options.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: as JSON.")] = False,
) -> None:
    """Run a job, inject a real fault, judge the recovery.

    `everstep drill FAULT --help` shows the options of a fault and of the job.

    The job runs on a local cluster of its own, which is torn down afterwards, and its ledger with it: the incident can
    be read later only with --keep, which ends with the commands for it. The same job then runs without the fault: the
    losses of all steps and the last state of every rank must be equal bit for bit. Of a script that reports no losses
    and has no checkpoint there is nothing to compare, and the result says so. Nothing may be left behind, and no rank
    may ever have two copies. In a script's arguments `{run}` stands for a folder that each run has of its own, for
    checkpoints that the script writes itself.

    Where a drill takes copies of the training state away or damages them, it looks itself at what is left, and says how
    many steps that may cost: one where the placement of the backups promises it. Small file systems need root, and so
    do drills of the network, whose machines are network namespaces with TLS.

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

    Exit codes: 0 fired and recovered as the fault deserves; 1 not; 2 wrong usage; 3 this fault cannot be injected here;
    4 as 0, but nothing could be compared with the run without the fault.
    """
    if list_faults:
        from console.views import drill as view

        view.catalogue(as_json=as_json)
    elif ctx.invoked_subcommand is None:
        raise ConfigError("name a fault; 'everstep drill --list' shows them")


def command_of(name: str, arguments: list[str]) -> Any:
    """The command that drills a fault, with its options and those of the job.

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
                help="The fault that opens the incident; its options can be used too. Default: kill-rank.",
                rich_help_panel=f"Options of {name}",
            ),
        ]
        options = dict(_options(fault_named(during), f"Options of {during}")) | options
    options |= dict(_options(JobOptions, "The job")) | OF_THE_DRILL

    def run(**chosen: Any) -> None:
        _drill(name, {key: value for key, value in chosen.items() if value not in (None, False, [])})

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=one) for key, one in options.items()]
    )
    run.__annotations__ = {}
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name, help=f"{fault.summary[0].upper()}{fault.summary[1:]}.")(run)
    return typer.main.get_command(single)


def _options(model: type[BaseModel], panel: str) -> Iterator[tuple[str, Any]]:
    """Field → its option. An option that is not chosen stays None: the model has the default."""
    from drills.faults.all import choices_of, option_of, shown_options

    for name, field in shown_options(model):
        choices = choices_of(field)
        inner = [one for one in get_args(field.annotation) if one is not type(None)]
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
    """The value of an option in arguments that are not parsed yet; empty: the option is absent."""
    for at, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == option and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return ""


def _drill(fault: str, chosen: dict[str, Any]) -> None:
    from console.views import drill as view
    from drills import interrupts
    from drills.faults.all import drill_request
    from drills.runner import run_drills
    from drills.verdict import together

    repeat, keep, as_json = chosen.pop("repeat", 1), chosen.pop("keep", False), chosen.pop("as_json", False)
    try:
        request = drill_request(fault, **chosen)
        results = interrupts.run(run_drills(request, repeat=repeat, say=view.progress, keep=keep, each=view.each))
    except CannotInject as refused:
        if as_json:
            print(json.dumps({"fault": fault, "fired": False, "refused": str(refused)}))
        print(f"error: {refused}", file=sys.stderr)
        raise typer.Exit(EXIT_CANNOT) from None
    if as_json:
        print(json.dumps(together(results) if repeat > 1 else results[0].model_dump(), indent=2))
    else:
        view.results(results)
    if not all(result.ok for result in results):
        raise typer.Exit(EXIT_NOT_RECOVERED)
    blind = [result for result in results if not result.compared and result.resolution != "parked"]
    raise typer.Exit(EXIT_NOT_COMPARED if blind else 0)
