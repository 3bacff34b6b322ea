"""Checks whether a machine has what everstep needs, with a remedy for each missing part."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from controlplane.local import cluster as local_cluster
from controlplane.local import ports, temporal_binary, temporal_server
from controlplane.local.cluster_file import everstep_home
from everstep.errors import ClusterError

Status = Literal["ok", "missing", "optional"]

SHM_WANTED = 1 << 30
"""Shared memory for the reports and checkpoints of a small job, bytes."""
DISK_WANTED = 1 << 30


class Examined(BaseModel):
    """The result of one check."""

    name: str
    status: Status
    """``missing``: everstep does not work without it; ``optional``: one feature does not work."""
    found: str
    remedy: str = ""


def examine(inventory: Path | None = None) -> list[Examined]:
    """Run all checks; a check that raises an error counts as ``missing``.

    Args:
        inventory: File with the machines of a deployed cluster, which are checked too; None: no such machines.
    """
    results = [_guarded(check) for check in CHECKS]
    return [*results, *([_guarded(partial(_inventory, inventory))] if inventory else [])]


def _guarded(check: Callable[[], Examined]) -> Examined:
    try:
        return check()
    except Exception as error:
        function = check.func if isinstance(check, partial) else check
        name = function.__name__.strip("_").replace("_", " ")
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
            return Examined(name="temporal", status="ok", found=f"configured: {choice.address} ({choice.namespace})")
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
    remedy = "have 1 GiB, or more for large checkpoints: mount -o remount,size=8G /dev/shm; docker: --shm-size=8g"
    return Examined(name="shared memory", status=status, found=found, remedy=remedy)


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


def _inventory(path: Path) -> Examined:
    from agent.client import AgentClients
    from controlplane.inventory import NAMED, Answer, ask, load

    inventory = load(path)

    async def answers() -> list[Answer]:
        agents = AgentClients()
        try:
            return await ask(inventory.machines, agents)
        finally:
            await agents.close()

    failed = [answer for answer in asyncio.run(answers()) if answer.problem]
    count = len(inventory.machines)
    text = f"{path}: {count - len(failed)} of {count} machines answer"
    problems = [f"{answer.machine.name}: {answer.problem}" for answer in failed[:NAMED]]
    more = [f"and {len(failed) - NAMED} more"] if len(failed) > NAMED else []
    remedy = "start their agents, or check address, name, certificates and token"
    status: Status = "missing" if failed else "ok"
    return Examined(name="inventory", status=status, found="; ".join([text, *problems, *more]), remedy=remedy)


CHECKS: tuple[Callable[[], Examined], ...] = (
    *(_python, _torch, _temporal, _shared_memory, _pidfd, _addresses, _ports, _disk),
    *(_go, _py_spy, _postgresql),
)
