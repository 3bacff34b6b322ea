"""The pages about settings: policies of a job, variables, and the events that receivers may choose."""

from __future__ import annotations

from console.main import COMMANDS, load
from docs.generate.markdown import code, descriptions, paragraph, settings, table
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.notice import NoticeKind
from everstep.model.recovery_policy import GROUPS
from everstep.rank import environment as variables


def policy() -> str:
    """Settings that decide how a job is recovered."""
    intro = paragraph(
        "The tables under `[policy]` of a job file decide how the job is recovered.",
        "The settings hold from its start to its end. A number from a paper names the section.",
        "Elsewhere a setting is named with its group: `hang.floor_s`.",
    )
    tables = [f"## `[policy.{name}]`\n\n{model.__doc__}\n\n{settings(model)}" for name, model in GROUPS.items()]
    return "\n\n".join((intro, *tables))


def checkpoint() -> str:
    """Settings that decide how a job's state is kept."""
    intro = paragraph(
        "The table `[checkpoint]` of a job file decides how the state of the job is kept.",
        "Paths are relative to the file. [Checkpoints](../concepts/checkpoints.md) explains where copies lie.",
    )
    return f"{intro}\n\n{settings(CheckpointPolicy)}"


def environment() -> str:
    """Variables of commands, workers, agents and ranks."""
    below = descriptions(variables)
    names = {name: value for name, value in vars(variables).items() if name.isupper() and isinstance(value, str)}
    rows = [(code(value), below[name]) for name, value in names.items() if name in below]
    options: dict[str, list[str]] = {}
    for command in COMMANDS:
        for option in load(command).params:
            if variable := getattr(option, "envvar", ""):
                options.setdefault(variable, []).append(code(f"{command} {option.opts[0]}"))
    instead = [(code(variable), ", ".join(commands)) for variable, commands in sorted(options.items())]
    return (
        f"## In place of options\n\n{table(('variable', 'instead of'), instead)}\n\n"
        f"## Between processes of everstep, and in ranks\n\n{table(('variable', 'meaning'), rows)}"
    )


def notices() -> str:
    """Kinds of notices."""
    below = descriptions(NoticeKind)
    rows = [(code(kind.value), below[kind.name]) for kind in NoticeKind]
    intro = paragraph(
        "A receiver chooses events by these names (`kinds`).",
        "[Notices](../guides/notices.md) explains the file of receivers.",
    )
    return f"{intro}\n\n{table(('kind', 'event'), rows)}"
