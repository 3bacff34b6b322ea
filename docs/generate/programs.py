"""The pages about programs: commands, faults of drills, metrics, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent.exposition import COMMON, RENAMED, SERIES, Described
from agent.monitor.all import INSPECTIONS
from agent.server.metrics import METRICS as OF_AGENT
from agent.statuses import STATUSES
from console.commands.drill import command_of
from console.main import COMMANDS, load
from controlplane.worker_metrics import METRICS as OF_WORKER
from controlplane.worker_metrics import OF_TEMPORAL
from docs.generate.markdown import code, paragraph, sentence, table
from drills.faults.all import FAULTS, usage_of
from everstep.errors import ConfigError, EverstepError, TopologyError


def commands() -> str:
    """Every command with its arguments and options."""
    parts = ["`everstep COMMAND --help` explains each option and has examples."]
    panels = dict.fromkeys(panel for _, panel, _ in COMMANDS.values())
    for panel in panels:
        rows = [row for name, (_, own, line) in COMMANDS.items() if own == panel for row in _rows(name, line)]
        parts.append(f"## {panel}\n\n{table(('command', 'does', 'options'), rows)}")
    return "\n\n".join(parts)


def _rows(name: str, line: str) -> Iterator[tuple[str, str, str]]:
    command = load(name)
    yield _row(f"everstep {name}", command, line)
    if name == "drill":
        of_every_drill = command_of("switch-down", [])  # a fault without options of its own
        yield _row("everstep drill FAULT", of_every_drill, "Beside the options of the fault: `everstep drill --list`.")
    for below, sub in getattr(command, "commands", {}).items():
        yield _row(f"everstep {name} {below}", sub, sentence((sub.help or "").split("\n\n")[0]))


def _row(called: str, command: Any, line: str) -> tuple[str, str, str]:
    arguments = [_argument(param) for param in command.params if param.param_type_name == "argument"]
    options = [param.opts[0] for param in command.params if param.param_type_name == "option"]
    options = [option for option in options if "completion" not in option]
    return code(" ".join([called, *arguments])), line, ", ".join(map(code, options))


def _argument(param: Any) -> str:
    name = (param.metavar or param.name.upper()).removesuffix("...").strip("[]")
    several = "…" if param.nargs == -1 and not name.endswith("…") else ""
    return f"{name}{several}" if param.required else f"[{name}{several}]"


def faults() -> str:
    """Every fault of drills."""
    rows = [(code(fault.name), code(usage_of(fault)), fault.summary, fault.not_soaked) for fault in FAULTS]
    return (
        "[Drills](../guides/drills.md) explains how a fault is injected and a recovery is judged.\n\n"
        f"{table(('fault', 'options', 'what happens', 'why no soak draws it'), rows)}"
    )


METRIC = ("metric", "labels", "meaning")


def metrics() -> str:
    """Every metric with its labels."""
    intro = paragraph(
        "[Metrics for Prometheus](../guides/monitoring.md) explains how they are served.",
        "Names follow Prometheus: base units (seconds, bytes), `_total` for what only grows. Names of other exporters",
        "are kept (`node_…`, `DCGM_…`, `process_…`); all others begin with `everstep_`. All metrics of an agent have",
        "the label `machine`. A job is the label `training_job`, since `job` is a label of Prometheus itself.",
        f"A metric has at most {SERIES} series in one answer.",
    )
    measured = [(kind, metric) for kind in INSPECTIONS for metric in kind.metrics.values()]
    inspected = [(*_metric(metric), code(kind.name)) for kind, metric in measured]
    temporal = [(code(name), meaning) for name, meaning in OF_TEMPORAL.items()]
    common = list(COMMON.values())
    return "\n\n".join(
        (
            intro,
            "## Of the agent",
            table(METRIC, map(_metric, [*OF_AGENT.values(), *common])),
            "## Measured by inspections",
            table((*METRIC, "inspection"), inspected),
            "## Of the worker",
            table(METRIC, map(_metric, [*OF_WORKER.values(), *common])),
            "## Of Temporal's SDK",
            "Temporal's own documentation lists all of them. The dashboard uses these:",
            table(("metric", "meaning"), temporal),
        )
    )


def _metric(metric: Described) -> tuple[str, str, str]:
    return code(metric.full_name), ", ".join(RENAMED.get(label, label) for label in metric.labels), metric.meaning


def errors() -> str:
    """The tree of errors, with exit codes and statuses."""
    intro = paragraph(
        "Every error that everstep raises on purpose derives from `EverstepError`; a dot is one level of the tree.",
        "The message says what was wrong, with which value, and what to do.",
        "The status is that of gRPC, between agent and control plane.",
    )
    rows = [
        (f"{'· ' * depth}{code(kind.__name__)}", _meaning(kind), _exit_code(kind), _status(kind))
        for kind, depth in _tree()
    ]
    return f"{intro}\n\n{table(('error', 'meaning', 'exit code', 'status'), rows)}"


def _tree(kind: type[Exception] = EverstepError, depth: int = 0) -> Iterator[tuple[type[Exception], int]]:
    yield kind, depth
    for below in kind.__subclasses__():
        if below.__module__ == EverstepError.__module__ and below.__bases__[0] is kind:
            yield from _tree(below, depth + 1)


def _meaning(kind: type[Exception]) -> str:
    return (kind.__doc__ or "").split("\n\n")[0]


def _exit_code(kind: type[Exception]) -> int:
    return 2 if issubclass(kind, ConfigError | TopologyError) else 1


def _status(kind: type[Exception]) -> str:
    return next((code(status.name) for error, status in STATUSES.items() if error is kind), "")
