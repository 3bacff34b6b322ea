"""Each log message is one line, as text or JSON, also from the standard library and from a replayed workflow."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from controlplane.logging_setup import configure
from everstep.errors import ConfigError, LedgerError

WORKFLOW = """
import asyncio
from datetime import timedelta

import structlog
from temporalio import activity, workflow

plain = structlog.get_logger("plain")

@activity.defn(name="work")
async def work() -> None:
    activity.logger.info("activity line", extra={"incident": "incident/gpt/0001"})

@workflow.defn(name="Logging")
class Logging:
    @workflow.run
    async def run(self) -> None:
        workflow.logger.info("first line", extra={"stage": "one"})
        plain.info("a slip")
        await workflow.sleep(0.01)
        workflow.logger.warning("second line %s", "two")
        await workflow.execute_activity(work, start_to_close_timeout=timedelta(seconds=30))
        workflow.logger.info("third line")
"""


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def parsed(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_json_lines_from_structlog_and_the_standard_library() -> None:
    out = io.StringIO()
    configure("agent", json=True, stream=out)
    with structlog.contextvars.bound_contextvars(machine="m2", correlation="m2-7"):
        structlog.get_logger("ours").info("rank ended", rank=5, path=Path("/x"))
        logging.getLogger("theirs").warning("%d left", 3, extra={"job": "gpt"})
    try:
        raise ValueError("bad")
    except ValueError:
        structlog.get_logger("ours").exception("it failed")
    first, second, third = parsed(out)
    assert {
        name: first[name] for name in ("event", "rank", "machine", "correlation", "process", "level", "logger")
    } == {
        "event": "rank ended",
        "rank": 5,
        "machine": "m2",
        "correlation": "m2-7",
        "process": "agent",
        "level": "info",
        "logger": "ours",
    }
    assert (second["event"], second["job"], second["machine"], second["level"]) == ("3 left", "gpt", "m2", "warning")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: bad" in third["exception"]
    assert "machine" not in third


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_of_everstep_is_one_line_without_secrets(*, as_json: bool) -> None:
    out = io.StringIO()
    configure("worker", json=as_json, stream=out)
    url = "postgresql+psycopg://everstep:hunter2@db/everstep"
    for log in (structlog.get_logger("ours").warning, logging.getLogger("temporalio.activity").warning):
        try:
            raise LedgerError(f"the ledger {url}: connection refused")
        except LedgerError:
            log("Completing activity as failed", exc_info=True)
    try:
        raise ValueError(f"cannot open {url}, password='hunter2'")
    except ValueError:
        structlog.get_logger("ours").exception("theirs", detail=f"dsn {url}", where={"url": 1})

    lines = out.getvalue().splitlines()
    assert sum("connection refused" in line for line in lines) == 2
    assert not any("Traceback" in line for line in lines[:2])
    assert "Traceback" in "".join(lines[2:])
    assert "hunter2" not in out.getvalue()
    assert "everstep:(hidden)@db/everstep" in out.getvalue()


@pytest.mark.parametrize("before", range(3_970, 4_010))
def test_the_cut_of_a_long_line_leaves_no_part_of_a_secret(before: int) -> None:
    out = io.StringIO()
    configure("worker", json=True, stream=out)
    structlog.get_logger("ours").warning("x" * before + " postgresql://me:hunter2hunter2@db/x " + "y" * 20_000)

    assert "hunter" not in out.getvalue()


def test_text_is_one_readable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_LOG_FORMAT", raising=False)
    out = io.StringIO()
    configure("worker", stream=out)
    structlog.get_logger().info("rank ended", rank=5, job="gpt")
    (line,) = out.getvalue().splitlines()
    assert "rank ended" in line
    assert line.index("process=worker") < line.index("job=gpt") < line.index("rank=5")
    assert "\x1b" not in line


def test_the_environment_chooses_the_format_and_an_argument_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOG_FORMAT", "json")
    out = io.StringIO()
    configure("worker", stream=out)
    structlog.get_logger().info("one")
    assert parsed(out)[0]["event"] == "one"
    text = io.StringIO()
    configure("worker", json=False, stream=text)
    structlog.get_logger().info("two")
    assert not text.getvalue().startswith("{")
    monkeypatch.setenv("EVERSTEP_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="'xml': use 'json' or 'text'"):
        configure("worker")
    with pytest.raises(ConfigError, match="'LOUD' is not a log level"):
        configure("worker", level="LOUD")


def test_a_second_configuration_replaces_the_first_one() -> None:
    out = io.StringIO()
    configure("worker", json=True, stream=out)
    configure("worker", json=True, level="warning", stream=out)
    structlog.get_logger().info("too quiet")
    logging.getLogger("x").info("too quiet")
    structlog.get_logger().warning("once")
    assert [line["event"] for line in parsed(out)] == ["once"]


def test_information_from_libraries_is_not_logged() -> None:
    out = io.StringIO()
    configure("worker", json=True, stream=out)
    logging.getLogger("alembic.runtime.migration").info("Context impl SQLiteImpl.")
    logging.getLogger("sqlalchemy.engine").warning("pool is empty")
    assert [line["event"] for line in parsed(out)] == ["pool is empty"]


async def test_a_replayed_workflow_logs_each_line_once(
    temporal: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging_workflow.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    import logging_workflow  # type: ignore[import-not-found]

    out = io.StringIO()
    configure("worker", json=True, stream=out)
    async with Worker(
        temporal,
        task_queue="logging",
        workflows=[logging_workflow.Logging],
        activities=[logging_workflow.work],
        max_cached_workflows=0,  # every workflow task replays the whole history
        workflow_runner=SandboxedWorkflowRunner(
            restrictions=SandboxRestrictions.default.with_passthrough_modules("structlog")
        ),
    ):
        await temporal.execute_workflow("Logging", id="job/gpt", task_queue="logging")
    ours = {"first line", "a slip", "second line two", "activity line", "third line"}
    lines = [line for line in parsed(out) if line["event"] in ours]
    assert sorted(line["event"] for line in lines) == sorted(ours)
    told = {line["event"]: line for line in lines}
    assert told["first line"]["stage"] == "one"
    assert told["first line"]["workflow_id"] == told["activity line"]["workflow_id"] == "job/gpt"
    assert told["activity line"]["incident"] == "incident/gpt/0001"
    assert told["second line two"]["level"] == "warning"
    assert not any("temporal_workflow" in line for line in parsed(out))


class Evidence:
    """A value that counts how often it is printed."""

    printed = 0

    def __repr__(self) -> str:
        Evidence.printed += 1
        return "a large value"


def deep(depth: int, evidence: Evidence) -> None:
    if depth:
        deep(depth - 1, evidence)
    raise ValueError("bad")


def chained(length: int) -> None:
    try:
        if length:
            chained(length - 1)
    finally:
        raise ValueError(f"link {length}")


def raised(case: str) -> None:
    match case:
        case "recursion":
            deep(500, Evidence())
        case "chain":
            chained(200)
        case "group":
            raise ExceptionGroup("many", [ValueError(f"one {n}") for n in range(5000)])
        case "message":
            raise ValueError("x" * 10**6)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("case", ["recursion", "chain", "group", "message"])
@pytest.mark.parametrize("logger", ["ours", "theirs"])
def test_every_traceback_is_plain_and_short(as_json: bool, case: str, logger: str) -> None:
    out = io.StringIO()
    Evidence.printed = 0
    configure("worker", json=as_json, stream=out)
    try:
        raised(case)
    except Exception:
        log = structlog.get_logger() if logger == "ours" else logging.getLogger("theirs")
        log.exception("it failed")
    said = parsed(out)[0]["exception"] if as_json else out.getvalue()
    assert "test_logging_setup.py" in said
    assert ("ValueError" if case != "group" else "ExceptionGroup: many (5000 sub-exceptions)") in said
    assert len(said) < 20_000
    assert said.count("\n") < 300
    assert Evidence.printed == 0, "a traceback does not show the values of variables"


def test_every_line_is_short() -> None:
    out = io.StringIO()
    configure("worker", json=True, stream=out)
    structlog.get_logger().warning("refused", error="y" * 10**6)
    [line] = parsed(out)
    assert len(line["error"]) < 20_000
    assert "characters are left out" in line["error"]
