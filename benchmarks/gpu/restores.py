"""Restores of a large state in a new process, the memory of the process that saves, and how long processes take to end.

python -P -m benchmarks.gpu.restores save|unpin|restore FOLDER GIGABYTES cuda|cpu
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint_saves import ROOT, scratch
from benchmarks.gpu.parts import Line
from benchmarks.gpu.room import missing_shm
from everstep.slots.file import SlotFile
from everstep.training.checkpoint import Checkpoint
from everstep.training.copies.cuda import TorchCuda

GIGABYTES, SMALL_GB = 8.0, 0.03
SLOTS = 3
PINNED_LIMIT_S = 60.0


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield times and sizes."""
    gigabytes = GIGABYTES if gpu else SMALL_GB
    if why := missing_shm(1.1 * SLOTS * gigabytes):
        yield Line("restore", None, why=why)
        return
    with scratch() as folder:
        found, exit_s = in_process("save", folder, gigabytes, gpu)
        yield Line("exit", exit_s, "s", why=f"{found['pinned'] / 1e9:.1f} GB are pinned")
        for what, size in found["memory"].items():
            yield Line(f"memory, {what}", size / 1e9, "GB")
        if gpu:
            _, exit_s = in_process("unpin", folder, gigabytes, gpu)
            yield Line("exit, slots are unpinned before", exit_s, "s")
        found, _ = in_process("restore", folder, gigabytes, gpu)
        yield Line("restore, pin the slot", found["pin_s"], "s")
        yield Line("restore, all", found["restore_s"], "s", why=f"{gigabytes:g} GB")


def in_process(mode: str, folder: Path, gigabytes: float, gpu: bool) -> tuple[dict[str, Any], float]:
    """Run a process; return its results, and the seconds from its last line of output to its end.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.restores"]
    command += [mode, str(folder), str(gigabytes), "cuda" if gpu else "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            code = process.wait()
        finally:
            process.kill()
    if code or not line:
        raise RuntimeError(f"the process that had to {mode} ended with exit code {code}")
    found: dict[str, Any] = json.loads(line)
    return found, time.time() - found["at"]


class Counting(TorchCuda):
    """The calls to CUDA, with what is pinned and how long that took."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        """Address → length, bytes."""
        self.took_s = 0.0

    def register(self, address: int, length: int) -> int:
        """Pin memory, and count it."""
        began = time.perf_counter()
        code = super().register(address, length)
        self.took_s += time.perf_counter() - began
        if not code:
            self.pinned[address] = length
        return code


def main() -> None:
    """Save, or restore, and print the results as the last thing before the end."""
    mode, folder, device = sys.argv[1], Path(sys.argv[2]), sys.argv[4]
    parameter = torch.nn.Parameter(torch.ones(int(float(sys.argv[3]) * 1e9) // 12, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    file, cuda = SlotFile(folder / "checkpoint", slots=SLOTS), Counting()
    saved = Checkpoint({"optimizer": optimizer}, file, overlap=True, cuda=cuda)
    found: dict[str, Any]
    began = time.perf_counter()
    if mode == "restore":
        saved.restore(SLOTS)
        found = {"restore_s": time.perf_counter() - began, "pin_s": cuda.took_s}
    else:
        saved.discard()
        for step in range(1, SLOTS + 1):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            saved.save(step)
            saved.wait()
        if device == "cuda":
            wait_until_pinned(file, cuda)
        found = {"memory": memory(device), "pinned": sum(cuda.pinned.values())}
        saved.close()
    at = time.time()
    if mode == "unpin":
        for address in cuda.pinned:
            cuda.unregister(address)
    print(json.dumps(found | {"at": at}), flush=True)


def wait_until_pinned(file: SlotFile, cuda: Counting) -> None:
    """Return when all slots are pinned.

    Raises:
        TimeoutError: they are not pinned in time.
    """
    wanted = sum(region.room for region in file.regions())
    deadline = time.monotonic() + PINNED_LIMIT_S
    while sum(list(cuda.pinned.values())) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{sum(cuda.pinned.values())} of {wanted} bytes are pinned after {PINNED_LIMIT_S:g} s")
        time.sleep(0.01)


def memory(device: str) -> dict[str, int]:
    """Return the memory of this process by kind, bytes."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {row[0].rstrip(":"): int(row[1]) for row in rows}
    found = {
        "private": 1024 * kilobytes["Pss_Anon"],
        "slots": 1024 * kilobytes["Pss_Shmem"],
        "files": 1024 * kilobytes["Pss_File"],
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["tensors on the GPU"] = torch.cuda.memory_reserved()
        found["all other use of the GPU"] = total - free - torch.cuda.memory_reserved()
    return found


if __name__ == "__main__":
    main()
