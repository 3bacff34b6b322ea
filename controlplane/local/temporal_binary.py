"""Finds or obtains the ``temporal`` program, which has server, SQLite and Web UI in one binary.

It is searched on PATH, and then in everstep's cache. If it is in neither, the SDK downloads it; if the download fails,
it is built with Go from ``deploy/temporal-server``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.files import file_of_ours
from controlplane.local.waiting import Progress, waiting
from everstep.errors import ClusterError

CLI_VERSION = "1.8.2"
"""Version of the program that is downloaded or built, with server 1.31.2 and Web UI 2.50.1."""
OLDEST_SERVER = (1, 29)
"""Oldest server that works; older servers lack features that the workflows use (worker deployments, update by id)."""
MEASURED_SERVER = (1, 31)
"""Version of the server with which settings and times were measured."""
TOOL_MODULE = file_of_ours("deploy/temporal-server")
PACKAGE = "github.com/temporalio/cli/cmd/temporal"
DOWNLOAD_LIMIT_S = 600.0
BUILD_LIMIT_S = 1800.0

_DOWNLOAD = """
import asyncio, os, sys
from temporalio.testing import WorkflowEnvironment

async def main():
    folder, version = sys.argv[1:]
    server = await WorkflowEnvironment.start_local(download_dest_dir=folder, dev_server_download_version=version)
    await server.shutdown()

try:
    asyncio.run(main())
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
os._exit(0)
"""


def cache_folder() -> Path:
    """The folder of a binary that was downloaded or built: ``$XDG_CACHE_HOME/everstep/bin``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everstep" / "bin"


def cached_binary() -> Path:
    """The path of the cached copy; it may be missing."""
    return cache_folder() / "temporal"


def server_version(binary: Path) -> str:
    """The version of the server in a ``temporal`` binary, e.g. ``"1.31.2"``; "" if it is not known."""
    try:
        reply = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"Server ([0-9.]+)", reply.stdout)
    return found.group(1) if found else ""


def usable(binary: Path) -> bool:
    """Whether the binary runs and its server is not too old."""
    return _numbers(server_version(binary)) >= OLDEST_SERVER


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number; empty if the version is not known."""
    return tuple(int(part) for part in version.split(".") if part)[:2]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def installed(progress: Progress) -> tuple[Path, str] | None:
    """A usable binary, and where it was found; None: there is none. ``progress`` gets a warning about a version with
    which nothing was measured."""
    if on_path := shutil.which("temporal"):
        if usable(Path(on_path)):
            version = server_version(Path(on_path))
            if _numbers(version) != MEASURED_SERVER:
                measured = _dotted(MEASURED_SERVER)
                progress(f"warning: {on_path} is server {version}; settings and times were measured on {measured}")
            return Path(on_path), "on PATH"
        version = server_version(Path(on_path)) or "unknown"
        progress(f"{on_path} is not used: its server is {version}, and {_dotted(OLDEST_SERVER)} or newer is needed")
    if cached_binary().exists() and usable(cached_binary()):
        return cached_binary(), "from the cache"
    return None


def obtain(progress: Progress) -> tuple[Path, str]:
    """Download or build a binary into the cache.

    Returns:
        The binary, and its source as text.

    Raises:
        ClusterError: download and build failed; the message has both reasons.
    """
    with _only_one(progress):
        if cached_binary().exists() and usable(cached_binary()):  # another process has filled the cache meanwhile
            return cached_binary(), "from the cache"
        if not (no_download := _download(progress)):
            return cached_binary(), "downloaded"
        progress(f"the download failed ({no_download}): building it with Go instead")
        if not (no_build := _build(progress)):
            return cached_binary(), "built with Go"
    raise ClusterError(
        "there is no Temporal server: TEMPORAL_ADDRESS is not set, there is no usable 'temporal' on PATH or in "
        f"{cache_folder()}, the download failed ({no_download}), and the build failed ({no_build}). Install the "
        "Temporal CLI or Go 1.26, or name a server: export TEMPORAL_ADDRESS=host:port"
    )


@contextmanager
def _only_one(progress: Progress) -> Iterator[None]:
    """Hold the lock of the cache, so that only one process at a time fills it."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting(progress, "waiting for another process that gets the Temporal server"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(progress: Progress) -> str:
    """Let the SDK download the server; returns why this failed, or "" if it succeeded."""
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        # This runs in a separate process, since the SDK also starts the server, and may crash the process at its exit.
        with waiting(progress, f"downloading Temporal CLI {CLI_VERSION} (about 50 MB, the SDK's own download)"):
            try:
                loaded = subprocess.run(
                    [sys.executable, "-P", "-c", _DOWNLOAD, folder, f"v{CLI_VERSION}"],
                    capture_output=True,
                    text=True,
                    timeout=DOWNLOAD_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"not done after {DOWNLOAD_LIMIT_S:.0f} s"
        if loaded.returncode:
            return _last_line(loaded.stderr) or f"exit code {loaded.returncode}"
        files = [path for path in Path(folder).iterdir() if path.is_file() and os.access(path, os.X_OK)]
        if len(files) != 1 or not usable(files[0]):
            return "the downloaded files have no usable binary"
        files[0].rename(cached_binary())
    return ""


def _build(progress: Progress) -> str:
    """Build the tool module with Go; returns why this failed, or "" if it succeeded."""
    if not (go := shutil.which("go")):
        return "Go is not on PATH"
    if not (TOOL_MODULE / "go.mod").exists():
        return f"{TOOL_MODULE} is missing: build from a checkout of everstep"
    log, fresh = cache_folder() / "build.log", cache_folder() / f"temporal.{os.getpid()}"
    link = f"-s -w -X github.com/temporalio/cli/internal/temporalcli.Version={CLI_VERSION}"

    def detail() -> str:
        lines = log.read_text(errors="replace").splitlines()
        compiled = sum(not line.startswith("go: ") for line in lines)
        return f"{compiled} of about 1,700 packages" if compiled else f"{len(lines)} modules loaded"

    command = [go, "build", "-v", "-mod=readonly", "-o", str(fresh), "-ldflags", link, PACKAGE]
    with log.open("w") as output, waiting(progress, "building the Temporal server with Go (up to 10 minutes)", detail):
        try:
            built = subprocess.run(
                command,
                cwd=TOOL_MODULE,
                env=os.environ | {"CGO_ENABLED": "0"},
                stdout=output,
                stderr=output,
                timeout=BUILD_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done after {BUILD_LIMIT_S:.0f} s, see {log}"
    if built.returncode:
        return f"{_last_line(log.read_text(errors='replace'))}, see {log}"
    fresh.rename(cached_binary())
    return ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
