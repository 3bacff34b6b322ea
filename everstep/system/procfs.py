"""Reads /proc: the processes of this computer, and the state of its kernel. All other modules use this one.

psutil is used only for network interfaces and connections; for processes it has disadvantages. It identifies a process
by its start in seconds of the wall clock, which is wrong after the clock is set. It takes three times as long to list
all processes. Its import takes 20 ms, so a fork server that imports it would delay a launch by that time. It reads
names and environments as text. It reads only /proc, while tests of inspections need another folder.

Functions about the computer, rather than about one process, have the folder as an argument.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks in a second."""
PAGE = os.sysconf("SC_PAGE_SIZE")
EXITING = 0x4
"""PF_EXITING, a flag of a thread that ends: nothing of its program runs any more."""
_ESCAPED = re.compile(rb"\\([0-7]{3})")


class ProcessInfo(NamedTuple):
    """One process, or one thread.

    The kernel uses process ids again; process id and start time together identify a process.
    """

    pid: int
    name: str
    state: str
    """One letter: ``R`` runs, ``D`` waits in the kernel, ``T`` is stopped, ``Z`` is a zombie."""
    parent: int
    session: int
    """Process id of the leader of its session."""
    start: int
    """Start time of the process, clock ticks since boot."""
    threads: int = 1
    flags: int = 0
    exit_status: int = 0
    """The status that ``waitpid`` returns; 0 before the process begins to end."""
    cpu_s: float = 0.0
    """CPU time of all its threads since it began."""
    resident_bytes: int = 0

    @property
    def lives(self) -> bool:
        """Whether the process still runs. A zombie runs only if threads other than its first one do."""
        return self.state not in "ZX" or self.threads > 1

    @property
    def is_ending(self) -> bool:
        """Whether the first thread of the process is ending; the kernel may take minutes to free the memory."""
        return bool(self.flags & EXITING)


# Processes.


def process_of(pid: int, proc: Path = PROC) -> ProcessInfo | None:
    """The process that now has an id; it may be a zombie. None: there is no such process."""
    return _read(proc / str(pid))


def threads_of(pid: int) -> list[ProcessInfo]:
    """All threads of a process; none when it is gone."""
    with suppress(OSError):
        return [thread for task in (PROC / str(pid) / "task").iterdir() if (thread := _read(task)) is not None]
    return []


def pids() -> list[int]:
    """The ids of all processes."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def processes() -> Iterator[ProcessInfo]:
    """All processes, zombies too."""
    return (process for pid in pids() if (process := process_of(pid)) is not None)


def living() -> Iterator[ProcessInfo]:
    """All processes except zombies."""
    return (process for process in processes() if process.lives)


def is_alive(pid: int, start: int) -> bool:
    """Whether the process with this id and start time still runs, and is not a zombie."""
    process = process_of(pid)
    return process is not None and process.start == start and process.lives


def start_ticks(pid: int) -> int:
    """Start time of a process, clock ticks since boot; 0 when there is no such process."""
    process = process_of(pid)
    return process.start if process else 0


def state_of(pid: int, start: int) -> str:
    """One-letter state of the process with this id and start time; empty: it is gone."""
    process = process_of(pid)
    return process.state if process is not None and process.start == start else ""


def children(pid: int) -> set[int] | None:
    """Children of a process that has one thread; None: it is gone, or this kernel does not list them."""
    try:
        return {int(child) for child in (PROC / f"{pid}/task/{pid}/children").read_bytes().split()}
    except OSError:
        return None


def environment(pid: int) -> list[bytes]:
    """The variables, ``NAME=value``, that a process was started with; none when they cannot be read."""
    return _strings(PROC / str(pid) / "environ")


def arguments(pid: int) -> list[bytes]:
    """The command line of a process; empty when it cannot be read."""
    return _strings(PROC / str(pid) / "cmdline")


def has_mapped(pid: int, path: Path) -> bool:
    """Whether a process has a file mapped."""
    with suppress(OSError):
        return os.fsencode(path) in (PROC / str(pid) / "maps").read_bytes()
    return False


def open_files(pid: int) -> dict[int, str]:
    """The open files of a process, by descriptor; empty when they cannot be read."""
    files = {}
    with suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                files[int(entry.name)] = str(entry.readlink())
    return files


def main_thread_s(pid: int) -> tuple[float, float] | None:
    """CPU time of the first thread of a process, and the time it waited for a CPU, seconds; None: not readable."""
    try:
        had_ns, waited_ns, _ = (PROC / str(pid) / "schedstat").read_bytes().split()
        return int(had_ns) / 1e9, int(waited_ns) / 1e9
    except (OSError, ValueError):
        return None


def io_bytes(pid: int) -> int:
    """Bytes that a process has read and written in all; -1: the number cannot be read."""
    try:
        lines = (PROC / str(pid) / "io").read_bytes().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith((b"rchar:", b"wchar:")))
    except (OSError, IndexError):
        return -1


def anonymous_bytes(pid: int) -> int:
    """Bytes of a process's memory that belong to no file; 0: the number cannot be read."""
    return int(_status(PROC / str(pid)).get(b"RssAnon", b"0").split()[0]) * 1024


def voluntary_switches(pid: int, spared: tuple[bytes, ...]) -> int:
    """How often the threads of a process gave up their CPU to wait for something.

    Args:
        pid: The id of the process.
        spared: Threads whose names begin with one of these are left out, except the first thread.
    """
    total = 0
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            status = _status(task)
            if task.name == str(pid) or not status.get(b"Name", b"").startswith(spared):
                total += int(status.get(b"voluntary_ctxt_switches", b"0"))
    return total


# This process.


def set_own_name(name: str) -> None:
    """Set the name of this process in lists of processes, at most 15 bytes."""
    (PROC / "self/comm").write_text(name)


def own_oom_adjustment() -> int:
    """What is added to this process's score (0 to 1000) when the kernel chooses a process to kill for lack of memory.

    A negative number protects the process.
    """
    return int((PROC / "self/oom_score_adj").read_text())


def give_up_oom_protection() -> None:
    """Let the kernel choose this process for lack of memory like any other, and all processes that it starts later."""
    if own_oom_adjustment() < 0:
        (PROC / "self/oom_score_adj").write_text("0")


def own_descriptors() -> set[int]:
    """Descriptors of this process's open files."""
    descriptors = set()
    for number in [int(entry.name) for entry in (PROC / "self/fd").iterdir()]:
        with suppress(OSError):  # the descriptor that listed them is closed
            os.fstat(number)
            descriptors.add(number)
    return descriptors


def own_arguments() -> tuple[int, int]:
    """Addresses of the beginning and the end of this process's command line, which lists of processes show."""
    fields = _fields((PROC / "self/stat").read_bytes())
    return int(fields[45]), int(fields[46])


def of_descriptor(descriptor: int) -> Path:
    """A short path to a file or folder that this process has open."""
    return PROC / f"self/fd/{descriptor}"


def network_namespace() -> Path:
    """The file of this thread's network namespace. Its inode identifies the namespace; an open file keeps it alive."""
    return PROC / "thread-self/ns/net"


def cgroups(proc: Path = PROC) -> list[tuple[list[str], str]]:
    """The cgroups of this process, each with its controllers (none in version 2) and its name; empty: not readable."""
    groups = []
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            groups.append(([part for part in controllers.split(",") if part], name))
    return groups


def owner_of_hidden_files() -> int | None:
    """The user id that root's files show in a container that does not map root; None: all users are mapped."""
    with suppress(OSError, ValueError):
        _, outside, count = map(int, (PROC / "self/uid_map").read_text().split()[:3])
        if (outside, count) != (0, 2**32 - 1):
            return int((PROC / "sys/kernel/overflowuid").read_text())
    return None


# The computer.


def boot_id() -> str:
    """The id of this boot. Start times and process ids of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """The kernel's table of memory, in bytes.

    Raises:
        OSError: the table cannot be read.
    """
    rows = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 2}


def pressure(resource: str, proc: Path = PROC) -> dict[str, float]:
    """How long processes had to wait for a resource (pressure stall information).

    Args:
        resource: ``cpu``, ``memory`` or ``io``.
        proc: The folder /proc.

    Returns:
        Percent of the time by measure, e.g. ``some avg60``; empty where the kernel does not measure it.
    """
    waits: dict[str, float] = {}
    with suppress(OSError, ValueError):
        for line in (proc / "pressure" / resource).read_text().splitlines():
            kind, *fields = line.split()
            waits |= {f"{kind} {name}": float(value) for name, _, value in (field.partition("=") for field in fields)}
    return waits


class Mount(NamedTuple):
    """One file system that is mounted."""

    point: str
    kind: str
    source: str
    writable: bool


def mounts(proc: Path = PROC) -> dict[str, Mount]:
    """The mounted file systems by mount point; if several are mounted on one point, the last of them.

    Raises:
        OSError: the table cannot be read.
    """
    mounted = {}
    for line in (proc / "self/mountinfo").read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fields, (kind, source, options) = before.split(), after.split(b" ", 2)
        point = _unescaped(fields[4])
        writable = b"rw" in fields[5].split(b",") and b"rw" in options.split(b",")
        mounted[point] = Mount(point, _unescaped(kind), _unescaped(source), writable)
    return mounted


def network_counters(protocol: str, proc: Path = PROC) -> dict[str, float]:
    """The kernel's counters of a protocol, e.g. ``Tcp``, in this network namespace; empty: it has none.

    Raises:
        OSError: the counters cannot be read.
    """
    rows = [
        line.split()[1:] for line in (proc / "net/snmp").read_text().splitlines() if line.startswith(f"{protocol}:")
    ]
    with suppress(ValueError):
        names, values = rows
        return dict(zip(names, map(float, values), strict=True))
    return {}


def processor_model(proc: Path = PROC) -> str:
    """Model of the processors; empty: not known."""
    with suppress(OSError):
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def nvidia_driver(proc: Path = PROC) -> str:
    """The line with the version of NVIDIA's driver; empty: there is no such driver."""
    with suppress(OSError, IndexError):
        return (proc / "driver/nvidia/version").read_text().splitlines()[0]
    return ""


def nvidia_gpus(proc: Path = PROC) -> dict[str, dict[str, str]]:
    """The GPUs of NVIDIA's driver: address on PCI → fields of the driver's description. No GPU is opened.

    Empty where there is no such driver.
    """
    gpus = {}
    for file in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            fields = (line.partition(":") for line in file.read_text().splitlines())
            gpus[file.parent.name] = {name.strip(): value.strip() for name, _, value in fields}
    return gpus


def _read(folder: Path) -> ProcessInfo | None:
    try:
        data = (folder / "stat").read_bytes()
    except OSError:
        return None
    # A name may be any bytes, since every user can set the name of a process.
    number, _, name = data[: data.rindex(b")")].partition(b" (")
    fields = _fields(data)
    return ProcessInfo(
        pid=int(number),
        name=os.fsdecode(name),
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        threads=int(fields[17]),
        flags=int(fields[6]),
        exit_status=int(fields[49]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS,
        resident_bytes=int(fields[21]) * PAGE,
    )


def _fields(stat: bytes) -> list[bytes]:
    """The fields of a stat file that follow the name."""
    return stat[stat.rindex(b")") + 1 :].split()


def _status(folder: Path) -> dict[bytes, bytes]:
    with suppress(OSError):
        lines = (line.partition(b":") for line in (folder / "status").read_bytes().splitlines())
        return {name: value.strip() for name, _, value in lines}
    return {}


def _strings(file: Path) -> list[bytes]:
    with suppress(OSError):
        if data := file.read_bytes():
            return data.removesuffix(b"\0").split(b"\0")
    return []


def _unescaped(field: bytes) -> str:
    """A path of the table of mounts, in which spaces, tabs, newlines and backslashes are written in octal."""
    return os.fsdecode(_ESCAPED.sub(lambda octal: bytes([int(octal[1], 8)]), field))
