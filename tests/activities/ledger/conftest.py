"""Every ledger test runs on SQLite and on a scratch PostgreSQL cluster."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.ledger import Ledger

HOW_TO_INSTALL = (
    "PostgreSQL's server programs were not found (pg_config --bindir, PATH, /usr/lib/postgresql/*/bin). "
    "Install them (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; "
    "macOS: brew install postgresql), or set EVERSTEP_TEST_POSTGRES=off to test on SQLite only."
)
SWITCHED_OFF = os.environ.get("EVERSTEP_TEST_POSTGRES") == "off"
SWITCHED_OFF_REASON = "EVERSTEP_TEST_POSTGRES=off"


def postgres_programs() -> Path | None:
    """Folder that holds initdb and pg_ctl."""
    folders: list[Path] = []
    if shutil.which("pg_config"):
        found = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(found.stdout.strip()))
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def unprivileged() -> tuple[int, int] | None:
    """User and group that run the server, None for our own: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return user.pw_uid, user.pw_gid
    pytest.fail("running as root, and neither user 'postgres' nor 'nobody' exists to run PostgreSQL: add one")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a scratch cluster, up to the database's name."""
    programs = postgres_programs()
    if programs is None:
        pytest.fail(HOW_TO_INSTALL)
    who = unprivileged()
    # Short: the path of a unix socket has 107 characters at most.
    home = Path(tempfile.mkdtemp(prefix="evpg-", dir="/tmp"))
    user, group = who or (None, None)
    if who:
        os.chown(home, *who)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(program: str, *args: str) -> None:
        log = home / f"{program}.out"
        with log.open("wb") as out:  # not a pipe: the server would keep it open
            done = subprocess.run(
                [str(programs / program), *args],
                stdout=out,
                stderr=out,
                cwd="/",
                check=False,
                timeout=100,
                user=user,
                group=group,
            )
        assert done.returncode == 0, f"{program} failed:\n{log.read_text()}"

    data = str(home / "data")
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={home} -c fsync=off"
    try:
        call("initdb", "-D", data, "-U", "everstep", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")
        call("pg_ctl", "-D", data, "-w", "-l", str(home / "server.log"), "-o", settings, "start")
        try:
            yield f"postgresql+psycopg://everstep@127.0.0.1:{port}/"
        finally:
            call("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database that is new and empty."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    if SWITCHED_OFF:
        pytest.skip(SWITCHED_OFF_REASON)
    import psycopg

    server: str = request.getfixturevalue("postgres")
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.replace("+psycopg", "") + "postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server + name


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """An open ledger."""
    with Ledger.open(url) as opened:
        yield opened
