"""Ways to save the state after every step; they have one interface, and ``benchmarks/checkpoint.py`` compares them.

Each is configured to be as fast as possible, and saves into memory, so that none waits for a disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

DLROVER_RUN = "TORCHELASTIC_RUN_ID"
"""The environment variable from which DLRover takes the names of its shared memory and its sockets."""


class Saver:
    """Base class of the savers, which itself saves nothing."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.folder = folder
        self.rank = rank
        self.waited_s = 0.0
        """Time for which the last save waited for an earlier one, seconds."""

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each step; the save runs between two steps."""
        for step in range(total):
            yield step
            self.save(step + 1)

    def save(self, completed_steps: int) -> None:
        """Save the state, or begin to save it."""

    def gate(self) -> None:
        """Wait until the optimizer may change parameters and its own state."""

    def report(self, step: int, loss: float) -> None:
        """Report a step, if the saver needs that."""

    def saved_bytes(self) -> int | None:
        """Return the size of the newest complete copy, bytes; None: this rank saves nothing."""
        return None

    def close(self) -> None:
        """Wait for unfinished work, and release all resources."""

    def state(self) -> dict[str, Any]:
        """Return the state dicts of model and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class BlockingCopy(Saver):
    """Copies each tensor into warm shared memory with one memmove: the fastest blocking save that is possible."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        path = self.folder / f"plain-{self.rank}"
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self.state()))
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._size = size

    def save(self, completed_steps: int) -> None:
        """Copy all tensors."""
        at = self._base
        for tensor in tensors_of(self.state()):
            size = tensor.numel() * tensor.element_size()
            ctypes.memmove(at, tensor.data_ptr(), size)
            at += size

    def saved_bytes(self) -> int:
        """Return the size of the copy."""
        return self._size


class Dcp(Saver):
    """torch's ``dcp.async_save`` with a gloo group of its own; two folders in ``/dev/shm`` take the saves in turn."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import torch.distributed as dist

        self._group: Any = dist.new_group(backend="gloo")
        self._upload: Future[Any] | None = None
        self._stager: Any = None
        self._staged: Future[Any] | None = None

    def save(self, completed_steps: int) -> None:
        """Wait until an earlier save has ended, since a stager has room for one save; then stage the state. A thread
        writes the files."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        began = time.perf_counter()
        if self._upload is not None:
            self._upload.result()
        self.waited_s = time.perf_counter() - began
        # Each rank needs keys of its own: DCP writes what two ranks save under one key only once.
        saving: Any = async_save(
            {f"rank-{self.rank}": self.state()},
            storage_writer=FileSystemWriter(
                self.folder / f"dcp-{completed_steps % 2}", single_file_per_rank=True, sync_files=False
            ),
            process_group=self._group,
            async_stager=self._stager,
        )
        if self._stager is None:
            self._upload = saving
        else:
            self._upload, self._staged = saving.upload_completion, saving.staging_completion

    def gate(self) -> None:
        """Wait for the stager."""
        if self._staged is not None:
            self._staged.result()

    def saved_bytes(self) -> int:
        """Return the size of this rank's files in the newest checkpoint."""
        if self._upload is not None:
            self._upload.result()
        newest = max(self.folder.glob("dcp-*"), key=lambda path: path.stat().st_mtime_ns)
        return sum(path.stat().st_size for path in newest.glob(f"__{self.rank}_*.distcp"))

    def close(self) -> None:
        """Wait for the last upload."""
        if self._upload is not None:
            self._upload.result()
        if self._stager is not None:
            self._stager.close()


class DcpStager(Dcp):
    """``dcp.async_save`` with ``DefaultStager``: a thread stages the state in shared memory while training
    continues."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=cuda
            )
        )


class DlroverMemory(Saver):
    """DLRover's flash checkpoint to memory for DDP: only rank 0 saves, since all ranks have the same state."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        flash = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer")
        ddp = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._memory = flash.StorageType.MEMORY
        self._checkpointer = ddp.DdpCheckpointer(str(self.folder / "dlrover"))
        self._step = 0

    def save(self, completed_steps: int) -> None:
        """Copy the state on rank 0."""
        self._step = completed_steps
        self._checkpointer.save_checkpoint(completed_steps, self.state(), storage_type=self._memory)

    def saved_bytes(self) -> int | None:
        """Return the size of DLRover's shared memory.

        Raises:
            RuntimeError: the last save was skipped.
        """
        if self.rank:
            return None
        engine = self._checkpointer._engine
        if engine._cached_step != self._step:
            raise RuntimeError(f"DLRover saved step {engine._cached_step}, not {self._step}")
        return int(engine._shm_handler.shared_memory.size)


def clean_dlrover(run: str) -> None:
    """Remove the shared memory and the sockets that DLRover leaves behind after a run."""
    for path in (*Path("/dev/shm").glob(f"{run}_*"), *Path("/tmp/ckpt_sock").glob(f"{run}/*")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        Path("/tmp/ckpt_sock", run).rmdir()


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state dict, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)
