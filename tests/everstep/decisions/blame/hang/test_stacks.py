"""The normal form of stacks: which stacks count as equal, and what the innermost frames of a stack do."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole, StackFrame, joined, normalise, short_file
from tests.everstep.decisions.blame.hang.made import TORCH, stack


def frames(*lines: str) -> list[StackFrame]:
    """Return frames from lines ``function file line``, the innermost first."""
    return [StackFrame(name, file, int(line)) for name, file, line in (one.split() for one in lines)]


HEALTHY = frames(
    f"all_reduce {TORCH} 4181",
    "_exception_logger.<locals>.wrapper torch/distributed/c10d_logger.py 83",
    "Layer.forward model.py 30",
    "Module._call_impl torch/nn/modules/module.py 1700",
    "Module._wrapped_call_impl torch/nn/modules/module.py 1600",
    "Sequential.forward torch/nn/modules/container.py 253",
    "Module._call_impl torch/nn/modules/module.py 1700",
    "train train.py 12",
    "<module> train.py 99",
    "_run_code <frozen_runpy> 88",
)


def test_lines_wrappers_layers_and_starters_make_no_difference() -> None:
    other = [frame._replace(line=frame.line + 7) for frame in HEALTHY]
    deeper = [*HEALTHY[:7], *HEALTHY[2:], *frames("fork agent/launcher/rank_process.py 3")]

    assert normalise(HEALTHY) == normalise(other) == normalise(deeper)
    assert str(normalise(HEALTHY)) == "train > forward > forward > all_reduce (collective)"


def test_the_inside_of_a_library_makes_no_difference() -> None:
    inner = frames("linear torch/nn/functional.py 1", "Linear.forward torch/nn/modules/linear.py 2")
    other = frames("layer_norm torch/nn/functional.py 9", "Linear.forward torch/nn/modules/linear.py 2")
    rest = frames("train train.py 12")

    assert normalise(inner + rest) == normalise(other + rest)


def test_the_same_name_in_another_file_is_another_function() -> None:
    assert normalise(frames("wait a.py 1")) != normalise(frames("wait b.py 1"))


def test_native_frames_are_left_out() -> None:
    native = frames("gloo::Context::wait libtorch_cpu.so 0", "0x7f2a libc.so.6 0", "step train.py 4")
    assert normalise(native) == normalise(frames("step train.py 4"))


MEGATRON = "megatron/core/pipeline_parallel/p2p_communication.py"


@pytest.mark.parametrize(
    ("functions", "kind", "operation", "toward"),
    [
        (("train", f"all_reduce@{TORCH}"), LeafKind.COLLECTIVE, "all_reduce", ""),
        (("train", "init", f"init_process_group@{TORCH}"), LeafKind.COLLECTIVE, "init_process_group", ""),
        (("recv_forward", f"irecv@{TORCH}"), LeafKind.P2P, "irecv", "previous"),
        (("send_forward", f"isend@{TORCH}"), LeafKind.P2P, "isend", "next"),
        (("recv_backward",), LeafKind.P2P, "recv_backward", "next"),
        (("send_backward",), LeafKind.P2P, "send_backward", "previous"),
        (("forward_backward_func", f"batch_isend_irecv@{TORCH}"), LeafKind.P2P, "batch_isend_irecv", ""),
        (("train", f"recv_forward@{MEGATRON}", f"_communicate@{MEGATRON}"), LeafKind.P2P, "_communicate", "previous"),
        (
            ("train", f"recv_backward@{MEGATRON}", f"_communicate@{MEGATRON}", "synchronize@torch/cuda/__init__.py"),
            LeafKind.P2P,
            "_communicate",
            "next",
        ),
        (("train", f"recv_forward@{MEGATRON}", "write@megatron/core/log.py"), LeafKind.OTHER, "write", ""),
        (
            ("step", "_wait_batch_p2p@torch/distributed/pipelining/schedules.py"),
            LeafKind.P2P,
            "_wait_batch_p2p",
            "",
        ),
        (
            ("get_batch", "__next__@torch/utils/data/dataloader.py", "select@selectors.py"),
            LeafKind.DATA,
            "__next__",
            "",
        ),
        (("step", "backward@torch/_tensor.py", "_engine_run_backward@torch/autograd/graph.py"), LeafKind.BELOW, "", ""),
        (("step", "synchronize@torch/cuda/__init__.py"), LeafKind.BELOW, "synchronize", ""),
        (("train", "flush_metrics"), LeafKind.OTHER, "flush_metrics", ""),
        (("train", "sleep_a_bit", "wait@threading.py"), LeafKind.OTHER, "sleep_a_bit", ""),
        (("reward", "urlopen@urllib/request.py", "recv_into@socket.py"), LeafKind.OUTSIDE, "recv_into", ""),
        (("judge", "post@requests/api.py", "read@ssl.py"), LeafKind.OUTSIDE, "read", ""),
        (("judge", "send@httpx/_client.py"), LeafKind.OUTSIDE, "send", ""),
        (("convert", "run@subprocess.py", "poll@selectors.py"), LeafKind.OUTSIDE, "poll", ""),
    ],
)
def test_leaves(functions: tuple[str, ...], kind: LeafKind, operation: str, toward: str) -> None:
    leaf = stack(*functions).leaf
    assert (leaf.kind, leaf.toward) == (kind, toward)
    assert operation in leaf.operation


def test_a_data_loader_is_idle_or_busy() -> None:
    loop = "_worker_loop@torch/utils/data/_utils/worker.py"
    idle = stack(loop, "get@multiprocessing/queues.py", "select@selectors.py")
    busy = stack(loop, "fetch@torch/utils/data/_utils/fetch.py", "__getitem__", "read_remote_shard")

    assert busy == stack("train", "__iter__@torch/utils/data/dataloader.py", loop, "__getitem__", "read_remote_shard")
    assert (idle.role, idle.leaf.kind) == (ProcessRole.DATA_LOADER, LeafKind.IDLE)
    assert (busy.leaf.kind, busy.leaf.operation) == (LeafKind.OTHER, "read_remote_shard")


def test_the_thread_of_autograd_shows_the_backward_pass_on_a_gpu() -> None:
    main = stack("step", "backward@torch/_tensor.py", "_engine_run_backward@torch/autograd/graph.py")
    thread = stack("backward", f"all_reduce@{TORCH}")

    assert joined(main, thread).leaf.kind is LeafKind.COLLECTIVE
    assert joined(main, thread) != joined(main, stack("backward", f"all_gather@{TORCH}"))


def test_files_are_short() -> None:
    assert short_file("/opt/venv/lib/python3.11/site-packages/torch/nn/a.py") == "torch/nn/a.py"
    assert short_file("/usr/lib/python3.11/threading.py") == "threading.py"
    assert short_file("/home/user/train.py") == "/home/user/train.py"
