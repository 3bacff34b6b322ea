"""Logging of one process: structlog and the standard library through one handler.

The lines are text for people, or on request one JSON object each::

    configure("worker")
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(job="gpt", incident="incident/gpt/0001"):
        log.warning("rank ended", rank=5, correlation="m2-7")

Workflow code logs by ``workflow.logger`` and activities by ``activity.logger``, which write nothing while Temporal
replays a history. Lines of plain structlog loggers during a replay are dropped here.

Tracebacks have neither the values of variables nor secrets, and their length is limited, since a log line is written in
the event loop. With the values of variables, one error in a workflow of 1,000 machines had 71,000 lines, and blocked a
worker for a minute.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import ExcInfo, Processor

from everstep.base.redaction import masked
from everstep.errors import ConfigError, EverstepError
from everstep.rank.environment import LOG_FORMAT

CONTEXT = ("process", "machine", "job", "incident", "correlation")
"""Names of the fields that are shown first, in their order."""
FRAMES = 30
"""At most this many frames are shown of an exception: those nearest to the raise."""
CHAINED = 8
"""At most this many exceptions are shown of a chain: the newest."""
GROUP = 8
"""At most this many exceptions are shown of a group, and at most this many levels of nested groups."""
HEAD, TAIL = 4_000, 12_000
"""Characters that are kept of a long text, from its beginning and its end."""

_QUIET = {"alembic": logging.WARNING, "sqlalchemy": logging.WARNING, "asyncio": logging.WARNING}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure(process: str, *, json: bool | None = None, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all logs of this process to one stream; call it at the start, and again to change it.

    Args:
        process: Kind of this process, e.g. ``worker``; it is part of every line.
        json: True: one JSON object per line; None: the format in ``EVERSTEP_LOG_FORMAT``, or else readable lines.
        level: The lowest level that is shown: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        stream: The stream to which lines are written; None: standard error.

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
        render = structlog.processors.ExceptionRenderer(_render)
        return [render, structlog.processors.JSONRenderer(default=str)]
    # The variable is read once, here, since code in a workflow's sandbox may not read the environment.
    colors = stream.isatty() and not os.environ.get("NO_COLOR")
    console = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, exception_formatter=_write)
    return [_ordered, console]


def _error_in_one_line(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Show an error of everstep in one line, without a traceback, since its text names the cause and the remedy."""
    info = fields.get("exc_info")
    error = info[1] if isinstance(info, tuple) else sys.exc_info()[1] if info is True else info
    if isinstance(error, EverstepError):
        del fields["exc_info"]
        fields.setdefault("error", str(error))
    return fields


def _bounded(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask secrets in the values of a line, and then cut long values, since an error may quote all of its input."""
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    fields.update({name: _cut(masked(value)) for name, value in texts.items()})
    return fields


def _ordered(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    first = {name: fields[name] for name in CONTEXT if name in fields}
    return {**first, **{name: value for name, value in fields.items() if name not in first}}


_TEMPORAL = {
    "temporal_workflow": ("workflow_id", "run_id"),
    "temporal_activity": ("workflow_id", "activity_type", "attempt"),
}


def _flatten_temporal(_logger: Any, _method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the fields that Temporal adds for a workflow or activity by the useful ids in them."""
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
    """Stop the SDK from appending ids to every message, since they are fields already."""
    if "temporalio" not in sys.modules:
        return  # a process without Temporal, such as an agent, must not import it for this
    from temporalio import activity, workflow

    workflow.logger.workflow_info_on_message = False
    activity.logger.activity_info_on_message = False
    # Workflow code runs in a sandbox that forbids what a handler of logs uses: locks, files, the clock.
    workflow.logger.unsafe_disable_sandbox()


def _cut(text: str) -> str:
    """The text; if it is long, only its beginning and end, with the number of characters that are left out."""
    left_out = len(text) - HEAD - TAIL
    return text if left_out <= 0 else f"{text[:HEAD]}\n[... {left_out} characters are left out ...]\n{text[-TAIL:]}"


def _render(exc_info: ExcInfo) -> str:
    """The traceback of an exception as text."""
    kind, error, trace = exc_info
    shown = traceback.TracebackException(
        kind, error, trace, limit=-FRAMES, max_group_width=GROUP, max_group_depth=GROUP, compact=True
    )
    _shorten(shown)
    return _cut(masked("".join(shown.format()).rstrip("\n")))


def _write(stream: TextIO, exc_info: ExcInfo) -> None:
    """Write a traceback below a log line, for structlog's renderer."""
    stream.write("\n" + _render(exc_info))


def _shorten(shown: traceback.TracebackException) -> None:
    """Cut off the oldest exceptions of a chain, which grows with each retry that raises from the last error."""
    at: traceback.TracebackException | None = shown
    for _ in range(CHAINED - 1):
        if at is None:
            return
        at = at.__cause__ or at.__context__
    if at is not None:
        at.__cause__ = at.__context__ = None
