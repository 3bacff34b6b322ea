"""A PostgreSQL server with a new data folder, for one cluster or test."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from controlplane.local.cluster_processes import Process, alive, identify
from everstep.errors import ClusterError

HOW_TO_INSTALL = (
    "PostgreSQL's server programs were not found (pg_config --bindir, PATH, /usr/lib/postgresql/*/bin): install "
    "them (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server; macOS: brew install "
    "postgresql)"
)
FOLDER = Path("/tmp")
_NAME = re.compile(r"evpg-(\d+)-(\d+)-\w+")
PORT = 5432
"""Port of the server; it is part of the name of its unix socket."""
LIMIT_S = 100.0


def programs() -> Path | None:
    """Folder with initdb, postgres and pg_ctl; None: PostgreSQL is not installed."""
    folders: list[Path] = []
    if shutil.which("pg_config"):
        found = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(found.stdout.strip()))
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def unprivileged() -> tuple[int, int] | None:
    """User and group that run the server, since PostgreSQL refuses root; None: the current user.

    Raises:
        ClusterError: this process is root, and there is no suitable user.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return user.pw_uid, user.pw_gid
    raise ClusterError("PostgreSQL refuses to run as root, and neither user 'postgres' nor 'nobody' exists: add one")


def remove_stale() -> None:
    """Remove folders of dead owners, unless a server still runs there."""
    for path in FOLDER.glob("evpg-*"):
        found = _NAME.fullmatch(path.name)
        if found and not alive(Process(int(found[1]), int(found[2]))) and not _served(path):
            shutil.rmtree(path, ignore_errors=True)


def _served(home: Path) -> bool:
    try:
        pid = int((home / "data" / "postmaster.pid").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return False
    return identify(pid) is not None


class Postgres:
    """A server with its own data folder and unix socket; making the object does not start it.

    Raises:
        ClusterError: PostgreSQL is not installed, or cannot be set up.
    """

    def __init__(self) -> None:
        found = programs()
        if found is None:
            raise ClusterError(HOW_TO_INSTALL)
        self.programs, self.who = found, unprivileged()
        # The name of the folder is short, since the path of a unix socket has at most 107 characters.
        remove_stale()
        owner = identify(os.getpid())
        assert owner is not None
        self.home = Path(tempfile.mkdtemp(prefix=f"evpg-{owner.pid}-{owner.start}-", dir=FOLDER))
        self.data = str(self.home / "data")
        try:
            if self.who:
                os.chown(self.home, *self.who)
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        self.call("initdb", "-D", self.data, "-U", "everstep", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")

    def url(self, database: str = "postgres", password: str = "any", *, port: int = PORT) -> str:
        """The URL of the unix socket, which can be reached from all network namespaces; any password is accepted."""
        return f"postgresql+psycopg://everstep:{password}@/{database}?host={self.home}&port={port}"

    def settings(self, listen: str = "", *, port: int = PORT) -> list[str]:
        """Options of the server program; without fsync, since the data need not survive a crash."""
        return [
            "-p",
            str(port),
            "-c",
            f"unix_socket_directories={self.home}",
            "-c",
            f"listen_addresses={listen}",
            "-c",
            "fsync=off",
        ]

    def command(self) -> list[str]:
        """The command line that runs the server in the foreground, as an unprivileged user."""
        user: list[str] = []
        if self.who:
            setpriv = shutil.which("setpriv") or "setpriv"
            user = [setpriv, f"--reuid={self.who[0]}", f"--regid={self.who[1]}", "--clear-groups"]
        return [*user, str(self.programs / "postgres"), "-D", self.data, *self.settings()]

    def remove(self) -> None:
        """Remove the server's files."""
        shutil.rmtree(self.home, ignore_errors=True)

    def call(self, program: str, *args: str) -> None:
        """Run a program of PostgreSQL, as an unprivileged user.

        Raises:
            ClusterError: the program failed; the message has its error output.
        """
        user, group = self.who or (None, None)
        log = self.home / f"{program}.out"
        with log.open("wb") as out:  # not a pipe: the server would keep it open
            done = subprocess.run(
                [str(self.programs / program), *args],
                stdout=out,
                stderr=out,
                cwd="/",
                check=False,
                timeout=LIMIT_S,
                user=user,
                group=group,
            )
        if done.returncode:
            raise ClusterError(f"{program} of PostgreSQL failed: {log.read_text().strip()}")
