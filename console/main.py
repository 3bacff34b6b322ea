"""The command ``everstep``: its table of commands, and its errors and exit codes.

Each command is in a module of its own, which is imported when the command is used.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from controlplane.shown import clean
from everstep.errors import ConfigError, EverstepError, TopologyError

COMMANDS: dict[str, tuple[str, str, str]] = {
    # command: (module in console.commands, panel in the help, one line)
    "demo": ("demo", "Start here", "Run a training job that crashes, recovers and continues."),
    "up": ("cluster", "Local cluster", "Start a local cluster: Temporal, workers, one agent per machine."),
    "down": ("cluster", "Local cluster", "Stop the local cluster and every process of its jobs."),
    "doctor": ("cluster", "Local cluster", "Show what everstep needs on this machine, and what is missing."),
    "plan": ("plan", "Jobs", "Say what a job's checkpoints need, and how long saves and restarts take."),
    "run": ("run", "Jobs", "Run a training job and follow it; Ctrl-C detaches."),
    "attach": ("run", "Jobs", "Follow a running job."),
    "status": ("jobs", "Jobs", "Show the status of jobs."),
    "checkpoints": ("checkpoints", "Jobs", "Show which checkpoints of a job exist, and where."),
    "logs": ("jobs", "Jobs", "Show the output of a job's ranks."),
    "machines": ("machines", "Jobs", "Show which job has each machine, and the findings of its inspections."),
    "diagnose": ("diagnose", "Jobs", "Run diagnostic tests on machines that no job has."),
    "evict": ("pool", "Jobs", "Keep machines away from jobs; other machines replace them."),
    "release": ("pool", "Jobs", "Let jobs have evicted machines again."),
    "standbys": ("standbys", "Jobs", "Show how many standbys a cluster should have."),
    "stop": ("jobs", "Jobs", "End a job."),
    "resume": ("jobs", "Jobs", "Let a parked job try again."),
    "approve": ("jobs", "Jobs", "Approve the evictions for which a parked job waits."),
    "abandon": ("jobs", "Jobs", "Give up a job whose incident is open."),
    "update": ("updates", "Jobs", "Change the code of a running job, now or with the next recovery."),
    "rollback": ("updates", "Jobs", "Return a job to an earlier version of its code."),
    "versions": ("versions", "Jobs", "Show which code a job ran when, who changed it, and why."),
    "incidents": ("incidents", "Jobs", "List incidents with their outcomes."),
    "incident": ("incidents", "Jobs", "Show one incident: observations, decisions and actions, with times."),
    "verdict": ("verdict", "Jobs", "Record the true cause of an incident, after a person has found it."),
    "classify": ("classify", "Jobs", "Find what ended a job, from its logs alone; no cluster is needed."),
    "trace": ("trace", "Jobs", "Show what the ranks of a job do now, and on which machine it hangs."),
    "stacks": ("trace", "Jobs", "Show the stacks of ranks before an incident stopped them."),
    "analyze": ("analyze", "Jobs", "Find the machine that hangs or slows a job, from dumps; no cluster is needed."),
    "policy": ("policy", "Jobs", "Show which machines leave a job by which rules; explain and simulate."),
    "report": ("report", "Jobs", "Summarize the last days: incidents, lost time, evictions, ETTR."),
    "drill": ("drill", "Game days", "Inject a real fault and judge the recovery."),
    "worker": ("worker", "Deployment", "Run a worker: workflows, activities, watcher."),
    "notices": ("notices", "Deployment", "Test whether notices about events arrive."),
    "agent": ("agent", "Deployment", "Run the agent of one machine."),
}
"""All commands, in the order of the help."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
COLLECT_AFTER = (20_000, 20, 50)
"""Thresholds of Python's garbage collector. With the defaults, a sixth of a command's start would be garbage
collection, which frees almost nothing: nearly all imported objects stay alive."""


class LazyCommand(TyperCommand):
    """A placeholder for a command in the help; the command itself is imported when it is used."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Import the command and make its context."""
        return load(self.name or "").make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """The group of all commands in the table whose module exists."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the table's order."""
        return [name for name, (module, _, _) in COMMANDS.items() if importlib.util.find_spec(_path(module))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The placeholder of one command; None: there is no such command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        _, panel, line = COMMANDS[cmd_name]
        return LazyCommand(cmd_name, help=line, rich_help_panel=panel)


def _path(module: str) -> str:
    return f"console.commands.{module}"


def load(name: str) -> Any:
    """Import one command and return it: the function with its name in its module, or else the module's typer app."""
    module = importlib.import_module(_path(COMMANDS[name][0]))
    member = getattr(module, name, None)
    if callable(member) and not isinstance(member, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(member)
        return typer.main.get_command(single)
    command = typer.main.get_command(member if isinstance(member, typer.Typer) else module.app)
    return getattr(command, "commands", {}).get(name, command)


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"everstep {importlib.metadata.version('everstep')}")
        raise typer.Exit


@app.callback()
def everstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep large training jobs stepping.

    Start with `everstep demo`, or with `everstep up` and `everstep run`. Every command has `--help` with examples.

    Exit codes: 0 done; 1 failed (the message explains why and what to do); 2 wrong usage or a wrong job file;
    3 this machine cannot do it.
    """


def run(arguments: list[str] | None = None, commands: typer.Typer | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        (commands or app)(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except EverstepError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | TopologyError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # e.g. `everstep logs | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the flush below
        return EXIT_FAILED
    except Exception:
        sys.excepthook(*sys.exc_info())
        return EXIT_FAILED
    return 0


def main(commands: typer.Typer | None = None) -> None:
    """Entry point of the console script, and of programs with other commands."""
    gc.set_threshold(*COLLECT_AFTER)
    code = run(commands=commands)
    sys.stdout.flush()
    sys.stderr.flush()
    # After Temporal's client was used, a plain exit crashes about half the time: the client's threads outlive Python.
    os._exit(code)


if __name__ == "__main__":
    main()
