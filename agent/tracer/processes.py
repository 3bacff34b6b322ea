"""This module lists the processes of ranks, with their roles and the resources that they have used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from everstep.decisions.blame.hang.stacks import ProcessRole
from everstep.system import procfs
from everstep.system.procfs import ProcessInfo, living

TRACING = "t"
"""State of a process that is being traced. The process continues after the trace."""
STOPPED = "T"
"""State of a process that is stopped until it is continued."""
NAMES = {"pt_data_worker": ProcessRole.DATA_LOADER, "pt_elastic": ProcessRole.LAUNCHER}
"""Name that torch gives a process → the role of the process."""
OF_LIBRARIES = (b"gloo_", b"pt_", b"nccl", b"NCCL", b"cuda")
"""The names of threads of libraries begin with these. Gloo's thread, for example, wakes up 80 times per second."""


class FamilyMember(NamedTuple):
    """A process of a rank."""

    rank: int
    process: ProcessInfo
    role: ProcessRole | None
    """None: the name of the process does not show its role."""


class Used(NamedTuple):
    """The resources that a process has used since its start."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    """The time in which its first thread waited for a CPU."""
    io_bytes: int = -1
    """Bytes that it read and wrote; -1: this user may not read the number."""
    switches: int = 0
    """How often its threads waited and continued. Threads of libraries are not counted: they wake up all the time."""


def families(ranks: Mapping[int, int]) -> list[FamilyMember]:
    """Return the processes of some ranks, each rank itself before the processes that it started.

    Args:
        ranks: Rank → its process.
    """
    processes = {process.pid: process for process in living()}
    children: dict[int, list[int]] = defaultdict(list)
    of_session: dict[int, list[int]] = defaultdict(list)
    for process in processes.values():
        children[process.parent].append(process.pid)
        of_session[process.session].append(process.pid)
    family_members = []
    for rank, pid in sorted(ranks.items()):
        if pid not in processes:
            continue
        family_members.append(FamilyMember(rank, processes[pid], ProcessRole.TRAINER))
        members = _below(pid, children) | {member for member in of_session[pid] if member != pid}
        family_members += [
            FamilyMember(rank, processes[member], NAMES.get(processes[member].name)) for member in sorted(members)
        ]
    return family_members


def _below(pid: int, children: Mapping[int, Iterable[int]]) -> set[int]:
    found, todo = set[int](), list(children.get(pid, ()))
    while todo:
        child = todo.pop()
        if child not in found:
            found.add(child)
            todo.extend(children.get(child, ()))
    return found


def used(pid: int) -> Used:
    """Return the resources that a process has used; values that cannot be read are 0."""
    process = procfs.process_of(pid)
    if process is None:
        return Used()
    _, waited_s = procfs.main_thread_s(pid) or (0.0, 0.0)
    return Used(process.cpu_s, waited_s, procfs.io_bytes(pid), procfs.voluntary_switches(pid, OF_LIBRARIES))
