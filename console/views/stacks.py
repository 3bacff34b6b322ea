"""The stacks of ranks, as text: each stack once, with the processes that had it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent.tracer.dump_files import unpacked
from agent.v1 import agent_pb2 as pb
from console.views.incident_report import aligned
from controlplane.shown import clean
from everstep.dumps.py_spy import MAIN, ProcessDump, StackReader, role_of_process
from everstep.errors import DumpError

SERVERS = "agent/launcher/"
"""Frames of this folder belong to the launcher, and are not shown."""
PROCESSES_NAMED = 8
"""Number of processes that are named for one stack."""


def stacks_text(replies: Iterable[pb.StacksReply], ranks: Iterable[int] = ()) -> str:
    """The stacks of one sample, the most frequent first; then the processes without a stack, and why.

    Args:
        replies: Answers of the machines.
        ranks: Show only these, with all threads. Empty: all ranks, with the main thread of each process.
    """
    wanted = set(ranks)
    reader, blocks, missing = StackReader(), dict[str, list[str]](), list[tuple[str, str]]()
    for reply in sorted(replies, key=lambda one: one.machine):
        for one in reply.processes:
            if wanted and one.rank not in wanted:
                continue
            dumps = _dumps(reader, one)
            who = f"rank {one.rank} on {reply.machine}, pid {one.pid}, state {one.state}"
            if not dumps:
                missing.append((who, one.problem or "no stacks"))
            for dump in dumps:
                role = one.role or role_of_process(dump).value
                for text in _threads(dump, every=bool(wanted)):
                    blocks.setdefault(f"{role}\n{text}", []).append(who)
    lines = []
    for text, whose in sorted(blocks.items(), key=lambda item: -len(item[1])):
        role, _, frames = text.partition("\n")
        more = f", and {len(whose) - PROCESSES_NAMED} more" if len(whose) > PROCESSES_NAMED else ""
        lines += [f"{len(whose)} x {role}: {'; '.join(whose[:PROCESSES_NAMED])}{more}", frames, ""]
    if missing:
        lines += ["Without stacks", *aligned(missing, "  ")]
    return clean("\n".join(lines).rstrip())


def _dumps(reader: StackReader, one: pb.TracedProcess) -> list[ProcessDump]:
    data = unpacked(one.stacks)
    try:
        return reader.read(f"pid {one.pid}", data) if data else []
    except DumpError:
        return []


def _threads(dump: ProcessDump, *, every: bool) -> Iterator[str]:
    """The frames of the main thread, or of every one, the innermost last."""
    main = dump.main()
    for name, stack in dump.threads:
        if every or stack is main:
            head = [f"    thread {name}"] if name not in {"", MAIN} else []
            own = [frame for frame in stack.frames if every or not frame.file.startswith(SERVERS)]
            frames = [f"    {frame.function} ({frame.file}:{frame.line})" for frame in reversed(own)]
            yield "\n".join([*head, *(frames or ["    nothing in Python"])])
