"""The processes of a rank, with their roles and the resources that they have used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from everstep.decisions.blame.hang.stacks import ProcessRole
from everstep.system import procfs
from everstep.system.procfs import ProcessInfo, living

TRACING = "t"
"""State of a process that is traced just now: it continues when that is over."""
STOPPED = "T"
"""State of a process that is stopped until it is continued."""
NAMES = {"pt_data_worker": ProcessRole.DATA_LOADER, "pt_elastic": ProcessRole.LAUNCHER}
"""Names that torch gives its processes."""
OF_LIBRARIES = (b"gloo_", b"pt_", b"nccl", b"NCCL", b"cuda")
"""Threads of libraries, by the beginnings of their names: gloo's wakes 80 times a second whatever its rank does."""


class FamilyMember(NamedTuple):
    """A process of a rank."""

    rank: int
    process: ProcessInfo
    role: ProcessRole | None
    """None: its name does not say."""


class Used(NamedTuple):
    """The resources that a process has used since its start."""

    cpu_s: float = 0.0
    waited_s: float = 0.0
    """Time in which its first thread could have run and had no CPU."""
    io_bytes: int = -1
    """Read and written; -1: may not be asked."""
    switches: int = 0
    """How often its threads waited for something and went on; not those of libraries, which look around for ever."""


def families(ranks: Mapping[int, int]) -> list[FamilyMember]:
    """Return the processes of some ranks, each rank itself before the processes that it started.

    Args:
        ranks: Rank → its process.
    """
    everybody = {process.pid: process for process in living()}
    children: dict[int, list[int]] = defaultdict(list)
    of_session: dict[int, list[int]] = defaultdict(list)
    for process in everybody.values():
        children[process.parent].append(process.pid)
        of_session[process.session].append(process.pid)
    found = []
    for rank, pid in sorted(ranks.items()):
        if pid not in everybody:
            continue
        found.append(FamilyMember(rank, everybody[pid], ProcessRole.TRAINER))
        members = _below(pid, children) | {member for member in of_session[pid] if member != pid}
        found += [
            FamilyMember(rank, everybody[member], NAMES.get(everybody[member].name)) for member in sorted(members)
        ]
    return found


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
