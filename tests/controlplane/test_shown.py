"""No command shows text from outside as markup or as terminal commands, or in a line without limit."""

from __future__ import annotations

import asyncio
import io
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from activities.ledger.ledger import Ledger
from console import main
from console.commands.checkpoints import lines as checkpoint_lines
from console.commands.jobs import _show_report
from console.terminal import PlainConsole, styled
from console.views import drill
from console.views.display import Ending, Lines, Terminal
from controlplane import doctor
from controlplane.local.cluster_file import ClusterFile
from controlplane.problems import ProblemEvent
from controlplane.queries.checkpoints import CheckpointsReport
from controlplane.queries.events import IncidentEvent
from controlplane.queries.status import JobReport
from controlplane.shown import LONGEST, clean, clean_line
from drills.judge.result import DrillResult
from everstep.errors import ConfigError
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import IncidentSummary
from everstep.model.state_copy import StateCopies, Tier

HOSTILE = [
    "Connect failed [/tcp://10.0.0.3:29500] [bold]",
    "\x1b[2J\x1b]0;yours\x07\x9b31m gone\r over \x08\x00",
    "\u202eesrever \x85 line",
    "x" * 10_000,
    "one\ntwo\n\nthree",
    ":boom: \\[red] $HOME {line} %s",
]
"""Texts of exceptions as scripts or attackers may write them; those of gloo have brackets."""
SEEN = re.compile(r"[^\n\t\x20-\x7e\u2026\u2192\u00b7\ufffd]")


def check(shown: str) -> None:
    """Check the text that a terminal got."""
    assert not SEEN.search(shown), ascii(SEEN.search(shown))
    assert max(map(len, shown.splitlines()), default=0) < 4 * LONGEST, "a line has at most two cells of a table"


@given(st.text())
def test_cleaned_text_is_printable(text: str) -> None:
    shown = clean(text)

    assert all(one.isprintable() or one in "\n\t" for one in shown)
    assert clean(shown) == shown
    assert shown.count("\n") == text.count("\n")
    assert "\n" not in clean_line(text)
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=LONGEST))
def test_printable_text_is_not_changed(text: str) -> None:
    assert clean(text) == text


def test_a_lone_surrogate_is_shown_escaped() -> None:
    assert clean("a\ud800b") == "a\\ud800b"


def test_a_cut_line_shows_the_number_of_characters_that_are_left_out() -> None:
    assert clean("x" * 2_500) == "x" * 2_000 + " … (500 more characters)"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_console_shows_strings_without_markup(text: str) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=20_000)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(text, styled(text, "red"))
    console.print(text)
    console.print(text, style="bold", soft_wrap=True)
    console.print(table)

    check(out.getvalue())
    assert out.getvalue().startswith(clean(text).split("\n")[0])


def incident(text: str) -> IncidentSummary:
    return IncidentSummary(id="incident/gpt/0001", number=1, headline=text, stage=text)


def report(text: str) -> JobReport:
    known: dict[str, Any] = dict.fromkeys(("step", "loss", "ettr", "ettr_last_hour", "saved"))
    sizes = dict.fromkeys(("world_size", "tp", "pp", "dp", "generation", "incident_count"), 1)
    texts = dict.fromkeys(("name", "status", "outcome", "unconfirmed", "script", "backups", "kept", "link"), text)
    now = datetime.now(UTC)
    return JobReport(
        **(known | sizes | texts),
        launched=True,
        started=now,
        ended=now,
        args=[text],
        machines=[],
        silent=[text],
        ettr_unknown=[text],
        open_incident=incident(text),
        incidents=[incident(text)],
        rejected=[text],
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_status_shows_cleaned_text(text: str) -> None:
    out = io.StringIO()
    asyncio.run(_show_report(PlainConsole(file=out), None, report(text)))  # type: ignore[arg-type]
    check(out.getvalue())
    assert "0001" in out.getvalue()


@pytest.mark.parametrize("text", HOSTILE)
def test_attached_output_shows_cleaned_text(text: str) -> None:
    piped, screen = io.StringIO(), io.StringIO()
    terminal = Terminal()
    terminal._console = PlainConsole(file=screen)
    for shown in (Lines(piped), terminal):
        shown.note(text)
        shown.problem(ProblemEvent("began", "disk", ("m0",), text))
        shown.incident(IncidentEvent("parked", incident(text)), [text])
        shown.ended(Ending("failed", text, (text,), 1))
    check(piped.getvalue())
    check(screen.getvalue())


@pytest.mark.parametrize("text", HOSTILE)
def test_incidents_show_cleaned_text(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    url = f"sqlite:///{tmp_path}/ledger.db"
    found = Anomaly(id="m2-7", generation=1, symptom=Symptom.CRASH, headline=text, seen_ns=5)
    ends = [RankExit(rank=0, machine="m0", code=1, completed_steps=3, exception=text, log_tail=text)]
    with Ledger.open(url) as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/x.py"), started_ns=1)
        ledger.incident_opened("incident/gpt/0001", found, opened_ns=6)
        ledger.incident_evidence("incident/gpt/0001", Evidence(generation=1, exits=ends))
        ledger.incident_event("incident/gpt/0001", 1, time_ns=7, stage="decide", text=text)
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=terminal: answer)
        for command in (["incidents"], ["incident", "incident/gpt/0001"]):
            assert main.run([*command, "--ledger", url]) == 0
            check(re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out))


@pytest.mark.parametrize("text", HOSTILE)
def test_checkpoints_drills_the_doctor_and_errors_show_cleaned_text(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = StateCopies.one(rank=0, machine="m0", tier=Tier.DISK, completed_steps=3, reason=text)
    copies = CheckpointsReport(
        job="gpt",
        world_size=1,
        steps=[],
        restorable=[],
        damaged=[held],
        unfinished=0,
        unlisted=[held],
        disowned=0,
        silent=[],
        backup_machines={},
        backups=text,
    )
    finding = doctor.Examined(name="torch", status="missing", found=text, remedy=text)
    monkeypatch.setattr(doctor, "examine", lambda *_: [finding])
    PlainConsole().print("\n".join(checkpoint_lines(copies, None)))
    drill.results([DrillResult(fault="kill-rank", problems=[text], said=[text], leaked=[text], promise=text)])
    drill.progress(text)
    with pytest.raises(SystemExit):
        main.app(["doctor"])
    monkeypatch.setattr(ClusterFile, "load", lambda _: (_ for _ in ()).throw(ConfigError(text)))
    assert main.run(["checkpoints", "gpt"]) == main.EXIT_USAGE

    said = capsys.readouterr()
    check(said.out)
    check(said.err)
