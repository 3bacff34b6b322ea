"""New, old, newer and damaged ledgers are opened, also by many processes at once. Other databases are refused."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from activities.ledger.database import LedgerUrl, connect
from activities.ledger.ledger import Ledger
from activities.ledger.migrate import HEAD, VERSION_TABLE, configuration, migrate
from activities.ledger.tables import LedgerTable
from controlplane import doctor
from everstep.errors import LedgerError
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec

REVISIONS = [script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions()]

SAMPLES = {
    "0001": [
        "INSERT INTO jobs (run, name, started_ns, spec) VALUES (1, 'gpt', 5, '{\"tp\": 2}')",
        "INSERT INTO incidents (run, number, id, headline) VALUES (1, 7, 'incident/gpt/0007', 'rank 5 ended')",
        "INSERT INTO incident_events VALUES (1, 7, 1, 9, 'decide', 'reattempt')",
        "INSERT INTO incident_looks VALUES (1, 7, 1, 'm0', 9, '')",
        "INSERT INTO code_versions VALUES (1, 1, 'ab', 'running', 'ada', '', 5, '', '', '{\"number\": 1}', 9)",
        "INSERT INTO incident_verdicts VALUES (1, 7, 9, 'code', 'ada', 'a deadlock')",
    ],
}
"""Revision → statements that add rows to its tables. Each new revision needs an entry."""

OTHER = """
import sys
from activities.ledger.ledger import Ledger
from everstep.model.job import JobSpec
with Ledger.open(sys.argv[1]) as ledger:
    for number, _ in enumerate(sys.stdin):
        ledger.job_started(JobSpec(name=f"other-{number}", script="/job.py"), started_ns=number + 1)
        print("written", flush=True)
"""


def test_a_lost_file_is_made_again_by_the_processes_that_have_it_open(tmp_path: Path) -> None:
    """Otherwise they would write into a file that has no name any more, until they are restarted."""
    url, file = f"sqlite:///{tmp_path}/ledger.db", tmp_path / "ledger.db"
    command = [sys.executable, "-P", "-c", OTHER, url]
    with (
        Ledger.open(url) as ledger,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other,
    ):
        assert other.stdin and other.stdout
        for number in range(3):
            print(file=other.stdin, flush=True)
            assert other.stdout.readline() == "written\n"
            ledger.job_started(JobSpec(name=f"ours-{number}", script="/job.py"), started_ns=number + 1)
            if number < 2:
                file.unlink()
        other.stdin.close()
        assert other.wait(60) == 0
    with Ledger.open(url, create=False) as found:
        assert {job.name for job in found.jobs()} == {"other-2", "ours-2"}


def test_a_ledger_is_opened_once_it_can_be_and_says_why_it_cannot_be(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.write_text("a file, where the folder of the ledger should be")
    with Ledger(f"sqlite:///{away}/ledger.db") as ledger:
        for _ in range(2):
            with pytest.raises(LedgerError, match="cannot be made"):
                ledger.jobs()
        away.unlink()
        assert ledger.jobs() == []


WRITER = """
import sys
from activities.ledger.ledger import Ledger
from everstep.model.incident import Anomaly, Symptom
from everstep.model.job import JobSpec
url, me = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
with Ledger.open(url) as ledger:
    for i in range(15):
        ledger.job_started(JobSpec(name="gpt", script="/x.py"), started_ns=1)
        anomaly = Anomaly(id=f"m{i}", generation=1, symptom=Symptom.CRASH, headline="h", seen_ns=i + 1)
        ledger.incident_opened(f"incident/gpt/{i + 1}", anomaly, opened_ns=i + 1)
        ledger.incident_event(f"incident/gpt/{i + 1}", 1, time_ns=i, stage="seen", text=me)
        ledger.generation_stepped(f"lost-{i}", 1, stepped_ns=1)
"""


def test_two_processes_open_and_write_the_same_rows_at_once(url: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, url, str(i)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=100)
        assert writer.returncode == 0, errors
    with Ledger.open(url) as ledger:
        assert sorted(incident.number for incident in ledger.incidents("gpt")) == list(range(1, 16))
        assert len(ledger.jobs()) == 1 + 15
        found = ledger.incident("incident/gpt/0015")
        assert found is not None
        assert len(found.events) == 1


def test_the_named_head_is_the_newest_revision() -> None:
    assert ScriptDirectory.from_config(configuration()).get_current_head() == HEAD


def test_tables_and_migrations_agree(ledger: Ledger) -> None:
    engine = create_engine(ledger.url.url)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "target_metadata": None}
            )
            assert compare_metadata(context, LedgerTable.metadata) == []
    finally:
        engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_revision_is_migrated_to_head_with_its_rows(url: str, revision: str) -> None:
    assert revision in SAMPLES, f"add rows of revision {revision} to SAMPLES"
    where = LedgerUrl(url)
    engine = connect(where)
    try:
        migrate(engine, where, to=revision)
        with engine.begin() as connection:
            for row in SAMPLES[revision]:
                connection.execute(text(row.replace(":", r"\:")))
    finally:
        engine.dispose()
    with Ledger.open(url) as ledger:
        found = ledger.incident("incident/gpt/0007")
        assert found is not None
        assert (found.headline, [event.text for event in found.events]) == ("rank 5 ended", ["reattempt"])
        assert ledger.jobs()[0].spec == {"tp": 2}


def test_a_migration_that_fails_leaves_nothing_behind(url: str) -> None:
    engine = create_engine(LedgerUrl(url).url)
    try:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE theirs (id INTEGER)"))
            connection.execute(
                text("CREATE INDEX ix_incidents_id ON theirs (id)")
            )  # this index collides with one of the ledger's, after some tables were created
        with pytest.raises(LedgerError, match="already exists"):
            Ledger.open(url)
        assert inspect(engine).get_table_names() == ["theirs"]
        with engine.begin() as connection:
            connection.execute(text("DROP INDEX ix_incidents_id"))
        with Ledger.open(url) as ledger:
            assert ledger.jobs() == []
    finally:
        engine.dispose()


def newer(url: str, *changes: str) -> None:
    """Make a ledger of a later release, with these changes of its schema."""
    Ledger.open(url).close()
    engine = create_engine(LedgerUrl(url).url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
        for change in changes:
            connection.execute(text(change))
    engine.dispose()


def test_a_newer_ledger_with_only_additions_is_read_and_written_unchanged(url: str) -> None:
    newer(
        url,
        "ALTER TABLE incidents ADD COLUMN rack VARCHAR",
        "ALTER TABLE jobs ADD COLUMN size INTEGER NOT NULL DEFAULT 0",
        "CREATE TABLE standbys (name VARCHAR PRIMARY KEY)",
    )
    anomaly = Anomaly(id="m1-1", generation=1, symptom=Symptom("slow"), headline="rank 3 is slow", seen_ns=1)
    with Ledger.open(url) as ledger:
        ledger.job_started(JobSpec(name="gpt", script="/x.py"), started_ns=1)
        ledger.incident_opened("incident/gpt/0001", anomaly, opened_ns=2)
        assert [(one.symptom, one.headline) for one in ledger.incidents()] == [("slow", "rank 3 is slow")]
    engine = create_engine(LedgerUrl(url).url)
    with engine.connect() as connection:
        assert connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")) == "9999"
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("ALTER TABLE incidents RENAME COLUMN headline TO title", "incidents has no column headline"),
        ("ALTER TABLE jobs ADD COLUMN size INTEGER NOT NULL", "jobs requires a value for size"),
        ("DROP TABLE machine_events", "no table machine_events"),
    ],
)
def test_an_incompatible_newer_ledger_is_refused(url: str, change: str, why: str) -> None:
    if "NOT NULL" in change and url.startswith("sqlite"):
        change = "DROP TABLE intervals; CREATE TABLE intervals (run INTEGER, kind VARCHAR, start_ns BIGINT, "
        change += "end_ns BIGINT, cause VARCHAR, size INTEGER NOT NULL)"
        why = "intervals requires a value for size"
    newer(url, *change.split("; "))
    with pytest.raises(LedgerError, match=rf"revision 9999.*newer everstep.*upgrade.*{why}"):
        Ledger.open(url)


def test_a_database_of_another_program_is_refused(url: str) -> None:
    engine = create_engine(LedgerUrl(url).url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE jobs (id INTEGER)"))
    engine.dispose()
    with pytest.raises(LedgerError, match=r"not a ledger.*jobs"):
        Ledger.open(url)


def filled(file: Path) -> bytes:
    """Make a ledger with 200 incidents, and return the contents of its file."""
    with Ledger.open(f"sqlite:///{file}") as ledger:
        for i in range(200):
            ledger.incident_event(f"incident/gpt/{i}", 1, time_ns=i, stage="x", text="y" * 500)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return file.read_bytes()


def test_a_file_that_is_cut_off_or_no_database_is_named(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(LedgerError, match=r"garbage\.db.*damaged"):
        Ledger.open(f"sqlite:///{garbage}")
    torn = tmp_path / "torn.db"
    whole = filled(torn)
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LedgerError, match=r"torn\.db.*damaged"):
        Ledger.open(f"sqlite:///{torn}")


def test_damage_inside_the_file_is_named_by_the_call_that_meets_it_and_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening reads only a few pages, so its time does not grow with the file."""
    file = tmp_path / "ledger.db"
    whole = bytearray(filled(file))
    with sqlite3.connect(file) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'incident_events'").fetchone()
    connection.close()
    whole[(page - 1) * 4096 : page * 4096] = b"\xee" * 4096
    file.write_bytes(whole)
    monkeypatch.setattr(doctor, "CHECKS", ())

    with Ledger.open(f"sqlite:///{file}") as ledger:
        for _ in range(2):
            with pytest.raises(LedgerError, match="damaged: move it away"):
                ledger.incident("incident/gpt/0001")
        with pytest.raises(LedgerError, match="damaged: move it away"):
            ledger.check()
        [found] = doctor.examine(ledger=f"sqlite:///{file}")
        assert found.status == "missing"
        assert "damaged: move it away" in found.found
        file.rename(tmp_path / "damaged.db")
        ledger.incident_event("incident/gpt/0001", 1, time_ns=1, stage="x", text="y")
        ledger.check()
        [found] = doctor.examine(ledger=f"sqlite:///{file}")
        assert found.status == "ok"


def test_a_reader_creates_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        Ledger.open(f"sqlite:///{tmp_path}/none.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["", "ledger.db", "sqlite://", "sqlite:///:memory:", "mysql://x/y", "postgres:"])
def test_a_wrong_url_is_explained(url: str) -> None:
    with pytest.raises(LedgerError, match="sqlite:////absolute"):
        Ledger.open(url)


def test_a_server_that_does_not_answer_is_explained() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(LedgerError, match="check that PostgreSQL runs") as caught:
            Ledger.open(f"postgresql://me:secret@127.0.0.1:{port}/x")
    assert "secret" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="cannot be made"):
        Ledger.open(f"sqlite:///{tmp_path}/file/ledger.db")


def test_only_its_user_can_read_a_sqlite_ledger(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Ledger.open(f"sqlite:///{tmp_path / 'new' / 'l.db'}") as ledger:
            assert ledger.jobs() == []
            found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    finally:
        os.umask(before)
    assert found["l.db"] == 0o600
    assert set(found.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
