"""Stacks in a normal form that is equal for ranks with the same activity.

What a rank does is its role, the functions that its own code is in, and the *leaf*: what the innermost frames wait for.
Lines, addresses, wrappers, repeated layers and what a library does inside one call are left out, so that ranks in
different layers or micro-batches of the same phase are alike (the paper groups by string matching and does not say how
frames are made equal, section 5.1; these rules are ours).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class StackFrame(NamedTuple):
    """One frame of a stack."""

    function: str
    """The name that the interpreter reports, qualified if possible: ``Trainer.step``."""
    file: str
    """The path as the dump has it: ``torch/distributed/distributed_c10d.py``."""
    line: int


class ProcessRole(StrEnum):
    """The purpose of a process of a job."""

    LAUNCHER = "launcher"
    TRAINER = "trainer"
    DATA_LOADER = "data loader"
    CHECKPOINT = "checkpoint"


class LeafKind(StrEnum):
    """The activity of the innermost frames of a stack."""

    COLLECTIVE = "collective"
    """The frames are inside a collective of torch.distributed: the rank waits for the other ranks of a group."""
    P2P = "p2p"
    """The frames send to, or receive from, one other rank."""
    DATA = "data"
    """Waits for the data loader."""
    BELOW = "below"
    """In C++ that may compute or wait: the backward pass, DDP's buckets, a wait for the device."""
    IDLE = "idle"
    """Waits for work: a data loader's process whose queue is empty."""
    OTHER = "other"
    """Anything else: it computes, sleeps, waits for a lock, reads a file."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The innermost frames of a stack, reduced to their activity."""

    kind: LeafKind
    operation: str
    """The function that shows the activity: ``all_reduce``."""
    toward: str = ""
    """Where a p2p operation goes: the ``next`` or ``previous`` pipeline stage; empty: the frames do not show it."""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for another rank, or may wait: the code below Python shows no difference."""
        return self.kind in (LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.BELOW)

    @property
    def is_own(self) -> bool:
        """Whether the rank itself causes its delay."""
        return self.kind in (LeafKind.DATA, LeafKind.OTHER)

    def __str__(self) -> str:
        """Return text for people: ``all_reduce (collective)``."""
        return f"{self.operation} ({self.kind.value}{f', {self.toward} stage' if self.toward else ''})"


@dataclass(frozen=True, slots=True)
class Signature:
    """The activity of a process, without details that differ between ranks of the same activity."""

    role: ProcessRole
    path: tuple[tuple[str, str], ...]
    """Function and file, the outermost first."""
    leaf: Leaf
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.role, self.path, self.leaf)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        """Return text for people: ``train > step > all_reduce (collective)``."""
        names = [_last(function) for function, _ in self.path if function != "<module>"]
        if names and names[-1] == self.leaf.operation:
            names.pop()
        role = "" if self.role is ProcessRole.TRAINER else f"{self.role.value}: "
        return role + " > ".join([*names[-SHOWN:], str(self.leaf)])


SHOWN = 4
"""Functions of a signature that people see."""
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton"}
"""Code whose inner functions say nothing about the phase; only its entry is kept."""
_WRAPPERS = {"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "_fn", "apply", "wrapper"}
"""Frames of torch that wrap other frames."""
_SERVERS = ("agent/launcher/", "runpy.py", "<frozen", "<string>", "threading.py")
"""Functions that start a script or a thread."""
COLLECTIVES = frozenset(
    (
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_object",
        "all_gather_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "broadcast",
        "broadcast_object_list",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "wait_tensor",
        "new_group",
        "init_process_group",
        "_store_based_barrier",
        "rendezvous",
        "destroy_process_group",
        "_sync_params_and_buffers",
        "_broadcast_coalesced",
        "_verify_param_shape_across_processes",
    )
)
"""Functions of torch.distributed in which a rank waits for the other ranks of a group."""
_P2P_NAME = re.compile(r"(^|_)(i?send|i?recv|p2p)(_|$)")
_SITE = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3[^/]*/")


def short_file(file: str) -> str:
    """A file as py-spy shortens it: what follows the folder of packages or of the standard library."""
    return _SITE.sub("", file, count=1) if file.startswith("/") else file


def normalise(frames: Sequence[StackFrame], role: ProcessRole | None = None) -> Signature:
    """Return the activity of a thread.

    Args:
        frames: The frames, the innermost first, as py-spy reports them.
        role: The purpose of its process; None: the frames show it.
    """
    python = [frame._replace(file=short_file(frame.file)) for frame in frames if _is_python(frame)]
    role = role or role_of(python)
    if role is ProcessRole.DATA_LOADER:
        python = _forked(python)
    path: list[tuple[str, str]] = []
    inside = False
    for frame in reversed(python):
        library = _is_library(frame.file)
        if not _is_noise(frame) and not (library and inside):
            if frame[:2] in path:  # one layer inside another, or the same once more
                del path[path.index(frame[:2]) :]
            path.append(frame[:2])
        inside = library and (inside or not _is_noise(frame))
    return Signature(role, tuple(path), leaf_of(python, role))


def joined(main: Signature, backward: Signature) -> Signature:
    """What a rank does whose main thread is in the backward pass, which a thread of autograd's own computes (CUDA)."""
    return Signature(main.role, main.path + backward.path, backward.leaf)


def role_of(frames: Sequence[StackFrame]) -> ProcessRole:
    """Return the purpose of a process, from its frames."""
    for frame in frames:
        name = _last(frame.function)
        if name == "_worker_loop" and frame.file.endswith("utils/data/_utils/worker.py"):
            return ProcessRole.DATA_LOADER
        if "distributed/elastic/agent/" in frame.file or frame.file.endswith("distributed/launcher/api.py"):
            return ProcessRole.LAUNCHER
        if frame.file.endswith(("checkpoint/_async_process_executor.py", "strategies/async_utils.py")):
            return ProcessRole.CHECKPOINT
    return ProcessRole.TRAINER


def _forked(frames: list[StackFrame]) -> list[StackFrame]:
    """Without the frames in which the rank was as it forked a data loader's process."""
    loop = next((at for at, frame in enumerate(frames) if _last(frame.function) == "_worker_loop"), len(frames))
    return frames[: loop + 1]


def leaf_of(frames: Sequence[StackFrame], role: ProcessRole = ProcessRole.TRAINER) -> Leaf:
    """Return the activity of the innermost frames: those of libraries, and the first frame of the script."""
    if role is ProcessRole.DATA_LOADER:
        return _of_loader(frames)
    for at, frame in enumerate(frames):
        name = _last(frame.function)
        if not _is_library(frame.file):
            own = at == 0 and _P2P_NAME.search(name)  # waiting for work that was sent off has no frame of torch
            return Leaf(LeafKind.P2P, name, _toward(frames, at)) if own else Leaf(LeafKind.OTHER, name)
        kind = _of_library(frame.file, name)
        if kind is not None:
            return Leaf(kind, name, _toward(frames, at) if kind is LeafKind.P2P else "")
    return Leaf(LeafKind.OTHER, _last(frames[0].function) if frames else "nothing in Python")


def _of_library(file: str, name: str) -> LeafKind | None:
    """Return the activity that a function of torch implies for the whole stack; None: it implies none."""
    if file.startswith("torch/distributed/"):
        if name in COLLECTIVES:
            return LeafKind.COLLECTIVE
        return LeafKind.P2P if _P2P_NAME.search(name) else None
    if file.startswith("torch/utils/data/"):
        return LeafKind.DATA
    if file.startswith(("torch/autograd/graph", "torch/nn/parallel/distributed", "torch/cuda/")):
        return LeafKind.BELOW
    return None


def _of_loader(frames: Sequence[StackFrame]) -> Leaf:
    """A data loader's process waits for work, or is busy with what its frames above torch's loop say."""
    inner: list[StackFrame] = []
    for frame in frames:
        if _last(frame.function) == "_worker_loop":
            break
        inner.append(frame)
    if not inner or all(_is_library(one.file) and "torch/utils/data" not in one.file for one in inner):
        return Leaf(LeafKind.IDLE, "_worker_loop")
    own = next((one for one in inner if not _is_library(one.file)), inner[0])
    return Leaf(LeafKind.OTHER, _last(own.function))


def _toward(frames: Sequence[StackFrame], at: int) -> str:
    """Return the pipeline neighbour that a rank waits for, from the names of its functions (as in Megatron)."""
    for frame in frames[at:]:
        name = _last(frame.function)
        sends, receives = "send" in name, "recv" in name
        back, forth = "backward" in name, "forward" in name
        if back == forth:  # forward_backward_pipelining, irecv
            continue
        if sends and receives:  # send_forward_recv_backward
            return ""
        if not sends and not receives:
            leaf = _last(frames[at].function)
            sends, receives = "send" in leaf, "recv" in leaf
        if sends != receives:
            return "next" if receives == back else "previous"
    return ""


def _last(function: str) -> str:
    return function.rpartition(".")[2]


def _is_python(frame: StackFrame) -> bool:
    """Frames of native code (``py-spy --native``) have names and addresses that differ between builds."""
    return not frame.function.startswith("0x") and (".py" in frame.file or frame.file.startswith("<"))


def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith("<frozen")
    return file.partition("/")[0].removesuffix(".py") in _LIBRARIES


def _is_noise(frame: StackFrame) -> bool:
    if frame.file.startswith(_SERVERS):
        return True
    return _last(frame.function) in _WRAPPERS and frame.file.startswith("torch/")
