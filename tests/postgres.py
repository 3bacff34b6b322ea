"""A PostgreSQL server of a test's own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

HOW_TO_INSTALL = (
    "PostgreSQL's server programs were not found (pg_config --bindir, PATH, /usr/lib/postgresql/*/bin). "
    "Install them (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; "
    "macOS: brew install postgresql), or set EVERSTEP_TEST_POSTGRES=off to test on SQLite only."
)
SWITCHED_OFF = os.environ.get("EVERSTEP_TEST_POSTGRES") == "off"
SWITCHED_OFF_REASON = "EVERSTEP_TEST_POSTGRES=off"


def _programs() -> Path | None:
    """Folder that holds initdb and pg_ctl."""
    folders: list[Path] = []
    if shutil.which("pg_config"):
        found = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(found.stdout.strip()))
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def _unprivileged() -> tuple[int, int] | None:
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


class Postgres:
    """A server that is made anew; it listens on loopback and on a unix socket."""

    def __init__(self) -> None:
        programs = _programs()
        if programs is None:
            pytest.fail(HOW_TO_INSTALL)
        self._programs, self._who = programs, _unprivileged()
        # Short: the path of a unix socket has 107 characters at most.
        self.home = Path(tempfile.mkdtemp(prefix="evpg-", dir="/tmp"))
        if self._who:
            os.chown(self.home, *self._who)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._data = str(self.home / "data")
        self._call("initdb", "-D", self._data, "-U", "everstep", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")

    @property
    def url(self) -> str:
        """Up to the database's name, over loopback."""
        return f"postgresql+psycopg://everstep@127.0.0.1:{self.port}/"

    def socket_url(self, database: str, password: str) -> str:
        """Over the unix socket, which other network namespaces reach too; any password is right."""
        return f"postgresql+psycopg://everstep:{password}@/{database}?host={self.home}&port={self.port}"

    def start(self) -> None:
        """Start it, for the first time or again."""
        settings = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.home} -c fsync=off"
        self._call("pg_ctl", "-D", self._data, "-w", "-l", str(self.home / "server.log"), "-o", settings, "start")

    def kill(self) -> None:
        """End it without waiting for anybody."""
        self._call("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def remove(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.home, ignore_errors=True)

    def _call(self, program: str, *args: str) -> None:
        user, group = self._who or (None, None)
        log = self.home / f"{program}.out"
        with log.open("wb") as out:  # not a pipe: the server would keep it open
            done = subprocess.run(
                [str(self._programs / program), *args],
                stdout=out,
                stderr=out,
                cwd="/",
                check=False,
                timeout=100,
                user=user,
                group=group,
            )
        assert done.returncode == 0, f"{program} failed:\n{log.read_text()}"
