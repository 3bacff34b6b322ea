"""Checks whether this computer, and the machines of a deployed cluster, have what everstep needs; with remedies."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from agent.needs import SHARED_MEMORY
from agent.setup.checks import SHM_WANTED
from controlplane.local import cluster as local_cluster
from controlplane.local import ports, temporal_binary, temporal_server
from controlplane.local.cluster_file import everstep_home
from everstep.base.text import listed
from everstep.errors import ClusterError, ConfigError, LedgerError
from everstep.model.finding import Health

Status = Literal["ok", "missing", "optional", "unknown"]
STATUSES: dict[Health, Status] = {Health.HEALTHY: "ok", Health.FAULTY: "missing", Health.UNKNOWN: "unknown"}
"""Verdict of an agent about its machine → status."""

SERVER_SETTINGS = "its dynamic configuration cannot be read by clients: docs/guides/deploy.md names what it should have"
NAMED = 5
"""Number of machines that a line names."""
DISK_WANTED = 1 << 30


class Examined(BaseModel):
    """The result of one check."""

    name: str
    status: Status
    """``missing``: everstep does not work without it, or a machine lacks something that its agent needs;
    ``optional``: one feature does not work; ``unknown``: it could not be checked."""
    found: str
    remedy: str = ""
    machines: list[str] = []
    """The machines of the inventory that it is about; empty: this computer."""


def examine(inventory: Path | None = None, ledger: str = "") -> list[Examined]:
    """Run all checks; a check that raises an error counts as ``missing``.

    Args:
        inventory: File with the machines of a deployed cluster, whose agents check them; None: no such machines.
        ledger: URL of a ledger, which is read as a whole; empty: there is none.
    """
    results = [_guarded(check) for check in CHECKS]
    if ledger:
        results.append(_ledger(ledger))
    if inventory is None:
        return results
    try:
        return [*results, *_of_machines(inventory)]
    except ConfigError as error:
        remedy = "correct the file, or name another one"
        return [*results, Examined(name="inventory", status="missing", found=str(error), remedy=remedy)]


def _guarded(check: Callable[[], Examined]) -> Examined:
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Examined(name=name, status="missing", found=f"could not be checked: {error}", remedy="see the message")


def _python() -> Examined:
    status: Status = "ok" if sys.version_info >= (3, 11) and sys.platform == "linux" else "missing"
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {sys.executable}"
    return Examined(name="python", status=status, found=found, remedy="Python 3.11 or newer on Linux")


def _torch() -> Examined:
    program = (
        "import time; began = time.time(); import torch; "
        "print(torch.__version__, torch.cuda.device_count(), time.time() - began)"
    )
    remedy = "make setup (or: uv pip install 'torch>=2.11')"
    loaded = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    if loaded.returncode:
        last = (loaded.stderr.strip().splitlines() or ["no message"])[-1]
        return Examined(name="torch", status="missing", found=last, remedy=remedy)
    version, gpus, seconds = loaded.stdout.split()
    return Examined(name="torch", status="ok", found=f"{version}, {gpus} GPUs, imported in {float(seconds):.1f} s")


def _temporal() -> Examined:
    notes: list[str] = []
    remedy = "make temporal (downloads or builds it), or set TEMPORAL_ADDRESS to your own server"
    try:
        if choice := temporal_server.configured():
            found = f"configured: {choice.address} ({choice.namespace}); {SERVER_SETTINGS}"
            return Examined(name="temporal", status="ok", found=found)
    except ClusterError as error:
        return Examined(name="temporal", status="missing", found=str(error), remedy="correct the configuration")
    if installed := temporal_binary.installed(notes.append):
        binary, source = installed
        version = temporal_binary.server_version(binary)
        return Examined(name="temporal", status="ok", found=f"{binary}, {source}, server {version}")
    return Examined(name="temporal", status="missing", found="; ".join(notes) or "no server found", remedy=remedy)


def _shared_memory() -> Examined:
    usage = shutil.disk_usage("/dev/shm")
    status: Status = "ok" if usage.free >= SHM_WANTED and os.access("/dev/shm", os.W_OK) else "missing"
    found = f"/dev/shm: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    return Examined(name="shared memory", status=status, found=found, remedy=SHARED_MEMORY.remedy())


def _pidfd() -> Examined:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        remedy = "Linux 5.4 or newer; in a sandbox, allow the system call pidfd_open"
        return Examined(name="pidfd", status="missing", found=f"pidfd_open: {error}", remedy=remedy)
    return Examined(name="pidfd", status="ok", found="deaths of processes are detected at once")


def _addresses() -> Examined:
    base = local_cluster.BASE_ADDRESS
    try:
        with ports.Claims() as claims:
            found = claims.choose(base)
    except ClusterError as error:
        return Examined(name="addresses", status="missing", found=str(error), remedy="ip addr add 127.0.0.1/8 dev lo")
    return Examined(name="addresses", status="ok", found=f"{base} and the next ones, e.g. {found}")


def _ports() -> Examined:
    wanted = (local_cluster.TEMPORAL_PORT, local_cluster.UI_PORT)
    taken = [str(port) for port in wanted if not ports.is_free("127.0.0.1", port)]
    found = f"{' and '.join(taken)} in use; a new cluster uses other ports" if taken else "7233 and 8233 are free"
    return Examined(name="ports", status="ok", found=found)


def _disk() -> Examined:
    folder = everstep_home()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fits = free >= DISK_WANTED and os.access(folder, os.W_OK)
    found = f"{everstep_home()}: {free / 2**30:.1f} GiB free"
    remedy = "free 1 GiB in a folder that you can write, or set EVERSTEP_HOME to another folder"
    return Examined(name="disk", status="ok" if fits else "missing", found=found, remedy=remedy)


def _go() -> Examined:
    if go := shutil.which("go"):
        version = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout.strip()
        return Examined(name="go", status="ok", found=version)
    remedy = "Go 1.26 is only needed to build a Temporal server if none can be downloaded"
    return Examined(name="go", status="optional", found="not on PATH", remedy=remedy)


def _py_spy() -> Examined:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program:
        return Examined(name="py-spy", status="ok", found=program)
    return Examined(
        name="py-spy", status="optional", found="not found", remedy="for stacks of hung ranks: uv pip install py-spy"
    )


def _postgresql() -> Examined:
    try:
        import psycopg
    except ImportError as error:
        remedy = "only needed for a ledger in PostgreSQL: uv pip install 'everstep[postgresql]'"
        return Examined(name="postgresql", status="optional", found=f"no driver: {error}", remedy=remedy)
    return Examined(
        name="postgresql", status="ok", found=f"driver psycopg {psycopg.__version__} (the default is SQLite)"
    )


def _ledger(url: str) -> Examined:
    from activities.ledger.cleaning import ledger_size
    from activities.ledger.database import LedgerUrl
    from activities.ledger.ledger import Ledger

    try:
        file = LedgerUrl(url).file
        if file is not None and not file.exists():
            return Examined(name="ledger", status="ok", found=f"{file}: there is none yet; workers make it")
        with Ledger.open(url, create=False) as ledger:
            ledger.check()
            return Examined(name="ledger", status="ok", found=f"{ledger.url}: {ledger_size(ledger).line()}")
    except LedgerError as error:
        return Examined(name="ledger", status="missing", found=str(error), remedy="see the message")


def _of_machines(path: Path) -> list[Examined]:
    from agent.client import AgentClients
    from controlplane.inventory import load
    from controlplane.queries.setup import SetupAnswer, ask_setup

    machines = load(path).machines

    async def answers() -> list[SetupAnswer]:
        agents = AgentClients()
        try:
            return await ask_setup(agents, machines)
        finally:
            await agents.close()

    return [
        Examined(
            name=answer.name,
            status=STATUSES[answer.verdict],
            found=f"{_counted(answer.machines, len(machines))}: {answer.text}",
            remedy=answer.remedy,
            machines=answer.machines,
        )
        for answer in asyncio.run(answers())
    ]


def _counted(names: list[str], count: int) -> str:
    if len(names) == count > 1:
        return f"all {count} machines"
    return f"{len(names)} of {count} machines ({listed(names, NAMED)})"


CHECKS: tuple[Callable[[], Examined], ...] = (
    *(_python, _torch, _temporal, _shared_memory, _pidfd, _addresses, _ports, _disk),
    *(_go, _py_spy, _postgresql),
)
