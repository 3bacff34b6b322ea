"""Stacks in a normal form that is equal for ranks with the same activity.

The normal form has the role of the process, the functions of the script, and the *leaf*: the activity of the innermost
frames. It leaves out lines, addresses, wrappers, repeated layers, and what a library does inside one call. So ranks in
different layers or micro-batches of one phase are equal. (ByteRobust compares stacks as strings, section 5.1, and does
not describe how they are made equal.)
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
    """The name of the function, qualified if the interpreter reports it so: ``Trainer.step``."""
    file: str
    """The path in the form of the dump: ``torch/distributed/distributed_c10d.py``."""
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
    """The frames wait for the data loader."""
    BELOW = "below"
    """The frames are in C++ that may compute or wait: the backward pass, DDP's buckets, a wait for the device."""
    IDLE = "idle"
    """A data loader's process waits for work."""
    OUTSIDE = "outside"
    """The frames wait for an answer from outside of the job: a server, an object store, another program."""
    OTHER = "other"
    """Anything else: the frames compute, sleep, wait for a lock, or read a file."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The innermost frames of a stack, reduced to their activity."""

    kind: LeafKind
    operation: str
    """The function that shows the activity: ``all_reduce``."""
    toward: str = ""
    """The stage of the other rank of a p2p operation, ``next`` or ``previous``; empty if the frames do not show it."""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for another rank, or may wait for one in C++."""
        return self.kind in (LeafKind.COLLECTIVE, LeafKind.P2P, LeafKind.BELOW)

    @property
    def is_own(self) -> bool:
        """Whether the rank itself causes its delay."""
        return self.kind in (LeafKind.DATA, LeafKind.OUTSIDE, LeafKind.OTHER)

    def __str__(self) -> str:
        """Return text for people: ``all_reduce (collective)``."""
        return f"{self.operation} ({self.kind.value}{f', {self.toward} stage' if self.toward else ''})"


@dataclass(frozen=True, slots=True)
class Signature:
    """The normal form of a stack: the activity of a process."""

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
"""Number of functions in the text of a signature."""
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton"}
"""Libraries. Of several frames of libraries in a row, only the outermost is kept."""
_WRAPPERS = {"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "_fn", "apply", "wrapper"}
"""Functions of torch that only call another function; they are left out."""
_STARTERS = ("agent/launcher/", "runpy.py", "<frozen", "<string>", "threading.py")
"""Files whose functions start a script or a thread; they are left out."""
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
_OUTSIDE = (
    *("socket.py", "ssl.py", "selectors.py", "subprocess.py", "http/", "urllib/"),
    *("urllib3/", "requests/", "httpx/", "httpcore/", "aiohttp/", "botocore/", "grpc/"),
)
"""Files whose innermost functions wait for an answer. Ranks of a job reach each other in C++, without these."""
_P2P_NAME = re.compile(r"(^|_)(i?send|i?recv|p2p)(_|$)")
_SITE = re.compile(r".*/(?:site|dist)-packages/|.*/lib/python3[^/]*/")


def short_file(file: str) -> str:
    """Return a path without the folder of packages or of the standard library, as py-spy shortens it."""
    return _SITE.sub("", file, count=1) if file.startswith("/") else file


def normalise(frames: Sequence[StackFrame], role: ProcessRole | None = None) -> Signature:
    """Return the activity of a thread.

    Args:
        frames: The frames, the innermost first, as py-spy reports them.
        role: The purpose of the process; None if the frames are to show it.
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
            if frame[:2] in path:  # a layer inside a layer, or recursion
                del path[path.index(frame[:2]) :]
            path.append(frame[:2])
        inside = library and (inside or not _is_noise(frame))
    return Signature(role, tuple(path), leaf_of(python, role))


def joined(main: Signature, backward: Signature) -> Signature:
    """Return the activity of a rank on CUDA in the backward pass, which another thread than the main one computes."""
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
    """Return the frames of a data loader's process, without those of the rank at the time of the fork."""
    loop = next((at for at, frame in enumerate(frames) if _last(frame.function) == "_worker_loop"), len(frames))
    return frames[: loop + 1]


def leaf_of(frames: Sequence[StackFrame], role: ProcessRole = ProcessRole.TRAINER) -> Leaf:
    """Return the activity of the innermost frames, up to and including the first frame of the script."""
    if role is ProcessRole.DATA_LOADER:
        return _of_loader(frames)
    for at, frame in enumerate(frames):
        name = _last(frame.function)
        if not _is_library(frame.file):
            if frames[0].file.startswith(_OUTSIDE):
                return Leaf(LeafKind.OUTSIDE, _last(frames[0].function))
            is_p2p = at == 0 and _is_p2p(frames, at)  # ``Work.wait`` has no frame of torch
            return Leaf(LeafKind.P2P, name, _toward(frames, at)) if is_p2p else Leaf(LeafKind.OTHER, name)
        kind = _of_library(frame.file, name)
        if kind is LeafKind.BELOW and (caller := _script_frame(frames, at)) and _is_p2p(frames, caller):
            return Leaf(LeafKind.P2P, _last(frames[caller].function), _toward(frames, caller))
        if kind is not None:
            return Leaf(kind, name, _toward(frames, at) if kind is LeafKind.P2P else "")
    return Leaf(LeafKind.OTHER, _last(frames[0].function) if frames else "nothing in Python")


def _is_p2p(frames: Sequence[StackFrame], at: int) -> bool:
    """Return whether a function of the script waits for a p2p operation, by its name or by its caller's in the same
    file: Megatron's ``recv_forward`` calls ``_communicate``."""
    return any(
        frame.file == frames[at].file and _P2P_NAME.search(_last(frame.function)) for frame in frames[at : at + 2]
    )


def _script_frame(frames: Sequence[StackFrame], at: int) -> int:
    """Return the index of the first frame of the script after a frame; 0: there is none."""
    return next((index for index in range(at, len(frames)) if not _is_library(frames[index].file)), 0)


def _of_library(file: str, name: str) -> LeafKind | None:
    """Return the activity that a function of torch implies for the stack; None if it implies none."""
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
    """Return the activity of a data loader's process: it waits for work, or is busy inside torch's worker loop."""
    inner: list[StackFrame] = []
    for frame in frames:
        if _last(frame.function) == "_worker_loop":
            break
        inner.append(frame)
    if all(_is_library(frame.file) and "torch/utils/data" not in frame.file for frame in inner):
        return Leaf(LeafKind.IDLE, "_worker_loop")
    own = next((frame for frame in inner if not _is_library(frame.file)), inner[0])
    return Leaf(LeafKind.OTHER, _last(own.function))


def _toward(frames: Sequence[StackFrame], at: int) -> str:
    """Return the stage for which a rank waits, ``next`` or ``previous``, from names of functions as in Megatron."""
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
    """Return whether a frame is Python code; names and addresses of native frames differ between builds."""
    return not frame.function.startswith("0x") and (".py" in frame.file or frame.file.startswith("<"))


def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith("<frozen")
    return file.partition("/")[0].removesuffix(".py") in _LIBRARIES


def _is_noise(frame: StackFrame) -> bool:
    if frame.file.startswith(_STARTERS):
        return True
    return _last(frame.function) in _WRAPPERS and frame.file.startswith("torch/")
