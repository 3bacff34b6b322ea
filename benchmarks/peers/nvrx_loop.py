"""A toy loop without everstep, which NVIDIA's nvidia-resiliency-ext restarts within its processes.

    python benchmarks/peers/nvrx_loop.py FOLDER KILL_RANK AT_STEP STORE_PORT

One process runs for each rank. It appends the time of every step to ``FOLDER/<rank at the start>-<restart>``. One rank
kills itself between backward and the optimizer's step. The intervals and waits are the shortest ones that work with the
library.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]

FOLDER, KILL_RANK, AT_STEP, PORT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
STARTED_AS = int(os.environ["RANK"])
SHORT = timedelta(milliseconds=250)


def append(name: str, event: str) -> None:
    """Append an event and its time to a file."""
    with (FOLDER / name).open("ab", buffering=0) as file:
        file.write(f"{event} {time.time_ns()}\n".encode())


def train(call: inprocess.CallWrapper = None) -> None:
    """Make data-parallel steps of about the length of the example's steps, for ever."""
    append(f"{STARTED_AS}-{call.iteration}", "entered")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(str(call.iteration), STORES[0])  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    LEFT.append(group)
    torch.manual_seed(1)
    layers: list[Any] = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)] * 4
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(1_000_000):
        model(torch.randn(512, 64)).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        finish(group.allreduce([flat]))
        means = torch.split(flat / size, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        if step >= AT_STEP and call.iteration == 0 and KILL_RANK == STARTED_AS:
            append("fault", "fault")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        finish(group.barrier())
        append(f"{STARTED_AS}-{call.iteration}", "step")


STORES: list[Any] = []
"""The store for all runs of the loop, in rank 0, which is never killed: no restart has to wait for a new store."""
LEFT: list[Any] = []
"""Process groups of earlier runs, which must not be destroyed: that would wait for collectives with the dead rank."""


def finish(work: Any) -> None:
    """Wait for a collective in Python, since the library cannot interrupt a rank that waits inside gloo."""
    while not work.is_completed():
        time.sleep(0.0005)
    work.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORES.append(dist.TCPStore("127.0.0.1", PORT + 1, None, STARTED_AS == 0))  # type: ignore[attr-defined]
    inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": PORT},
        abort=None,  # the library can abort only NCCL
        monitor_thread_interval=SHORT,
        monitor_process_interval=SHORT,
        heartbeat_interval=SHORT,
        progress_watchdog_interval=SHORT,
        last_call_wait=SHORT,
    )(train)()
