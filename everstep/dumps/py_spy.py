"""Reads the output of ``py-spy dump``, as text or JSON.

Ten thousand ranks print the same few hundred stacks. So each stack is looked up by its bytes, and only a new stack is
parsed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.decisions.blame.hang.stacks import (
    LeafKind,
    ProcessRole,
    Signature,
    StackFrame,
    joined,
    normalise,
    role_of,
)
from everstep.dumps.unreadable import UNREADABLE
from everstep.errors import DumpError

MAIN, AUTOGRAD = "MainThread", "pt_autograd_"
_FRAME = re.compile(r"\s+(?P<function>\S.*?) \((?P<file>.+?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(rb'Thread \S+ \([^)]*\)(?:: "(?P<name>[^"]*)")?[ \t\r]*\n')
_PROCESS = re.compile(rb"^Process (\d+):", re.MULTILINE)
_KEY = b'"frames":'


@dataclass(slots=True)
class Stack:
    """A stack, shared by all threads that have the same lines."""

    frames: tuple[StackFrame, ...]
    """The frames, the innermost first."""
    signatures: dict[ProcessRole | None, Signature] = field(default_factory=dict)
    _role: ProcessRole | None = None
    _digest: int | None = None

    @property
    def digest(self) -> int:
        """A number of 64 bits that differs for stacks with other frames or lines; all processes compute the same."""
        if self._digest is None:
            text = repr([tuple(frame) for frame in self.frames]).encode(errors="replace")
            self._digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        return self._digest

    @property
    def role(self) -> ProcessRole:
        """The role of a process whose main thread has this stack."""
        if self._role is None:
            self._role = role_of(self.frames)
        return self._role

    def signature(self, role: ProcessRole | None = None) -> Signature:
        """The signature of the stack.

        Args:
            role: The role of the process; None: the frames show it.
        """
        if role not in self.signatures:
            self.signatures[role] = normalise(self.frames, role)
        return self.signatures[role]


@dataclass(slots=True)
class ProcessDump:
    """The threads of a process."""

    pid: int | None
    threads: list[tuple[str, Stack]]
    """Name and stack of each thread."""

    def main(self) -> Stack | None:
        """The stack of the main thread, or of the last thread if no thread has that name; None: there is no thread."""
        for name, stack in self.threads:
            if name == MAIN:
                return stack
        return self.threads[-1][1] if self.threads else None

    def position(self) -> tuple[int, ...]:
        """Digests of the lines at which the main thread and the threads of autograd are; empty: not known.

        Other threads are left out. Some of them, e.g. a thread that samples the GPU, progress even in a job that hangs.
        """
        main = self.main()
        stacks = [main] if main else []
        stacks += [stack for name, stack in self.threads if name.startswith(AUTOGRAD)]
        return tuple(stack.digest for stack in stacks) if any(stack.frames for stack in stacks) else ()

    def signature(self, role: ProcessRole | None = None) -> Signature | None:
        """The signature of the process; None: it has no threads.

        With CUDA, a backward pass runs in a thread of autograd, so the stack of that thread extends the main thread's.
        """
        main = self.main()
        if main is None:
            return None
        signature = main.signature(role)
        if signature.leaf.kind is LeafKind.BELOW:
            for name, stack in self.threads:
                if name.startswith(AUTOGRAD) and stack.frames:
                    return joined(signature, stack.signature(signature.role))
        return signature


class StackReader:
    """Reads dumps of many processes; equal stacks are kept once."""

    def __init__(self) -> None:
        self._texts: dict[bytes, Stack] = {}
        self._stacks: dict[tuple[StackFrame, ...], Stack] = {}

    def read(self, name: str, data: bytes) -> list[ProcessDump]:
        """The processes of a dump.

        Args:
            name: Name of the file, for messages.
            data: The output of py-spy, as text or with ``--json``.

        Raises:
            DumpError: the data is neither.
        """
        if data[:64].lstrip()[:1] == b"[":
            return self._read_json(name, data)
        return self._read_text(name, data)

    def _read_json(self, name: str, data: bytes) -> list[ProcessDump]:
        """Read JSON as py-spy formats it: the frames of each stack are looked up by their bytes, the rest is parsed."""
        pieces: list[bytes] = []
        stacks: list[Stack] = []
        at = 0
        while (key := data.find(_KEY, at)) >= 0:
            begin = key + len(_KEY)
            end = data.find(b"}]", begin) + 2
            if data[begin : begin + 3] == b"[],":
                end = begin + 2
            text = data[begin:end]
            stack = self._texts.get(text)
            if stack is None:
                try:
                    stack = self._texts[text] = self._shared(_frames(json.loads(text)))
                except UNREADABLE:
                    return self._read_plain_json(name, data)
            pieces += [data[at:begin], b"%d" % len(stacks)]
            stacks.append(stack)
            at = end
        pieces.append(data[at:])
        try:
            threads = json.loads(b"".join(pieces))
            return _processes([(thread, stacks[thread["frames"]]) for thread in threads])
        except UNREADABLE:
            return self._read_plain_json(name, data)

    def _read_plain_json(self, name: str, data: bytes) -> list[ProcessDump]:
        """Read JSON with other white space, or with keys in another order, by parsing all of it."""
        try:
            threads = json.loads(data)
            return _processes([(thread, self._shared(_frames(thread["frames"]))) for thread in threads])
        except UNREADABLE as error:
            raise DumpError(
                f"{name} is not what `py-spy dump --json` prints ({error}): dump that process again"
            ) from error

    def _read_text(self, name: str, data: bytes) -> list[ProcessDump]:
        heads = list(_PROCESS.finditer(data))
        if not heads and not _THREAD.search(data):
            raise DumpError(f"{name} is not what `py-spy dump` prints: it has no line `Thread …`")
        starts = [head.start() for head in heads] or [0]
        pids: list[int | None] = [int(head[1]) for head in heads] or [None]
        ends = [*starts[1:], len(data)]
        return [
            ProcessDump(pid, self._text_threads(data[begin:end]))
            for pid, begin, end in zip(pids, starts, ends, strict=True)
        ]

    def _text_threads(self, data: bytes) -> list[tuple[str, Stack]]:
        heads = list(_THREAD.finditer(data))
        ends = [*(head.start() for head in heads[1:]), len(data)]
        return [
            ((head["name"] or b"").decode(errors="replace"), self._text_stack(data[head.end() : end]))
            for head, end in zip(heads, ends, strict=True)
        ]

    def _text_stack(self, text: bytes) -> Stack:
        stack = self._texts.get(text)
        if stack is None:
            matches = map(_FRAME.fullmatch, text.decode(errors="replace").splitlines())
            frames = tuple(
                StackFrame(line["function"], line["file"], int(line["line"] or 0)) for line in matches if line
            )
            stack = self._texts[text] = self._shared(frames)
        return stack

    def _shared(self, frames: tuple[StackFrame, ...]) -> Stack:
        return self._stacks.setdefault(frames, Stack(frames))


def role_of_process(dump: ProcessDump) -> ProcessRole:
    """The role of a process, according to the frames of its main thread."""
    main = dump.main()
    return main.role if main else ProcessRole.TRAINER


def _frames(frames: Sequence[dict[str, Any]]) -> tuple[StackFrame, ...]:
    return tuple(
        StackFrame(
            str(frame["name"]), str(frame.get("short_filename") or frame["filename"]), int(frame.get("line") or 0)
        )
        for frame in frames
    )


def _processes(threads: list[tuple[dict[str, Any], Stack]]) -> list[ProcessDump]:
    found: dict[Any, ProcessDump] = {}
    for thread, stack in threads:
        pid = thread.get("pid")
        process = found.setdefault(pid, ProcessDump(pid if isinstance(pid, int) else None, []))
        process.threads.append((str(thread.get("thread_name") or ""), stack))
    return list(found.values())
