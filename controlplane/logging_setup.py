"""Logging of one process: structlog and the standard library through one handler.

Readable lines on a terminal, one JSON object per line on request::

    configure("worker")
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(job="gpt", incident="incident/gpt/0001"):
        log.warning("rank ended", rank=5, correlation="m2-7")

Workflow code logs by ``workflow.logger`` and activities by ``activity.logger``: these stay silent while a history is
only replayed. A plain structlog logger does not; so that a slip costs nothing, a line from a replay is dropped here
too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor

from controlplane import tracebacks
from everstep.base.redaction import masked
from everstep.errors import ConfigError, EverstepError
from everstep.rank.environment import LOG_FORMAT

CONTEXT = ("process", "machine", "job", "incident", "correlation")
"""Names of the bound context, in the order shown."""

_QUIET = {"alembic": logging.WARNING, "sqlalchemy": logging.WARNING, "asyncio": logging.WARNING}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure(process: str, *, json: bool | None = None, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logs of this process to one stream; call it at the start, and again to change it.

    Args:
        process: what this process is, e.g. ``worker``; it is part of every line.
        json: one JSON object per line; None: the format in ``EVERSTEP_LOG_FORMAT``, else readable lines.
        level: the lowest level that is shown: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        stream: standard error by default.

    Raises:
        ConfigError: the level or the environment's format does not exist.
    """
    if level.upper() not in _LEVELS:
        raise ConfigError(f"{level!r} is not a log level: use one of {', '.join(_LEVELS)}")
    stream = sys.stderr if stream is None else stream
    as_json = _json_wanted() if json is None else json
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *_shared(process)],
            processors=[
                _flatten_temporal,
                ProcessorFormatter.remove_processors_meta,
                _error_in_one_line,
                _bounded,
                *_rendering(as_json, stream),
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if getattr(old, "everstep", False):
            root.removeHandler(old)
    handler.everstep = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(logging.NOTSET if root.level == logging.DEBUG else max(least, root.level))
    structlog.configure(
        processors=[
            _drop_replayed,
            structlog.stdlib.filter_by_level,
            *_shared(process),
            ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    _quieten_temporal()


def _json_wanted() -> bool:
    match os.environ.get(LOG_FORMAT, ""):
        case "json":
            return True
        case "" | "text":
            return False
        case other:
            raise ConfigError(f"{LOG_FORMAT} is {other!r}: use 'json' or 'text'")


def _shared(process: str) -> list[Processor]:
    def name_process(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        fields.setdefault("process", process)
        return fields

    return [
        structlog.contextvars.merge_contextvars,
        name_process,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _rendering(as_json: bool, stream: TextIO) -> list[Processor]:
    if as_json:
        render = structlog.processors.ExceptionRenderer(tracebacks.render)
        return [render, structlog.processors.JSONRenderer(default=str)]
    # Chosen once, here: code in a workflow's sandbox may not read the environment.
    colors = stream.isatty() and not os.environ.get("NO_COLOR")
    console = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, exception_formatter=tracebacks.write)
    return [_ordered, console]


def _error_in_one_line(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Show an everstep error in one line, without a traceback: its text names the cause and the remedy."""
    info = fields.get("exc_info")
    error = info[1] if isinstance(info, tuple) else sys.exc_info()[1] if info is True else info
    if isinstance(error, EverstepError):
        del fields["exc_info"]
        fields.setdefault("error", str(error))
    return fields


def _bounded(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask secrets in the values of a line, then cut long values: an error may quote all of its input."""
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    fields.update({name: tracebacks.bounded(masked(value)) for name, value in texts.items()})
    return fields


def _ordered(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    first = {name: fields[name] for name in CONTEXT if name in fields}
    return {**first, **{name: value for name, value in fields.items() if name not in first}}


_TEMPORAL = {
    "temporal_workflow": ("workflow_id", "run_id"),
    "temporal_activity": ("workflow_id", "activity_type", "attempt"),
}


def _flatten_temporal(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep only the useful ids of the fields that Temporal adds for a workflow or activity."""
    for name, kept in _TEMPORAL.items():
        details = fields.pop(name, None)
        if isinstance(details, Mapping):
            fields.update({key: details[key] for key in kept if key in details and key not in fields})
    return fields


def _drop_replayed(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    workflow = sys.modules.get("temporalio.workflow")
    if workflow is not None and workflow.in_workflow() and workflow.unsafe.is_replaying_history_events():
        raise structlog.DropEvent
    return fields


def _quieten_temporal() -> None:
    """Keep the ids as fields; by default the SDK appends them to every message as well."""
    if "temporalio" not in sys.modules:
        return  # a process that does not talk to Temporal, such as an agent, does not pay for importing it
    from temporalio import activity, workflow

    workflow.logger.workflow_info_on_message = False
    activity.logger.activity_info_on_message = False
    # Workflow code runs in a sandbox that forbids what a handler does: locks, files, the clock.
    workflow.logger.unsafe_disable_sandbox()
