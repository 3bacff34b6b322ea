"""Dumps of py-spy. Text and JSON give the same result, and other files are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep.decisions.blame.hang.stacks import LeafKind, ProcessRole, StackFrame
from everstep.dumps.py_spy import Stack, StackReader, role_of_process
from everstep.errors import DumpError

TEXT = b"""Process 20391: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 0x7F12A4 (idle): "QueueFeederThread"
    wait (threading.py:320)
Thread 20391 (active+gil): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:4181)
    wrapper (torch/distributed/c10d_logger.py:83)
    train_step (train.py:26)
    <module> (/home/me/my (copy)/train.py:99)
"""


def frame(name: str, file: str, line: int) -> dict[str, Any]:
    return {
        "name": name,
        "filename": f"/x/{file}",
        "module": None,
        "short_filename": file,
        "line": line,
        "locals": None,
    }


def thread(pid: int, name: str | None, *frames: dict[str, Any]) -> dict[str, Any]:
    head = {"pid": pid, "thread_id": 7, "thread_name": name, "os_thread_id": pid, "active": False, "owns_gil": False}
    return head | {"frames": list(frames), "process_info": None}


DUMP = [
    thread(20391, "QueueFeederThread", frame("wait", "threading.py", 320)),
    thread(
        20391,
        "MainThread",
        frame("all_reduce", "torch/distributed/distributed_c10d.py", 4181),
        frame("wrapper", "torch/distributed/c10d_logger.py", 83),
        frame("train_step", "train.py", 26),
        frame("<module>", "/home/me/my (copy)/train.py", 99),
    ),
]


def compact(dump: Any) -> bytes:
    """Return a dump as JSON in the form that py-spy writes."""
    return json.dumps(dump, separators=(",", ":")).encode()


def test_text_and_json_say_the_same() -> None:
    reader = StackReader()
    (text,), (of_json,) = reader.read("a.txt", TEXT), reader.read("a.json", compact(DUMP))

    assert text.pid == of_json.pid == 20391
    assert [name for name, _ in text.threads] == ["QueueFeederThread", "MainThread"]
    assert text.main() is of_json.main()  # equal stacks are kept once
    signature = text.signature()
    assert signature is not None
    assert (signature.leaf.kind, signature.leaf.operation) == (LeafKind.COLLECTIVE, "all_reduce")


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(DUMP, indent=2).encode(),
        compact([{key: one[key] for key in sorted(one)} for one in DUMP]),
        compact([dict(reversed(one.items())) for one in DUMP]),
    ],
)
def test_json_of_any_layout_is_read(data: bytes) -> None:
    reader = StackReader()
    plain = reader.read("a", compact(DUMP))[0]
    assert reader.read("b", data)[0].main() is plain.main()


def test_brackets_in_names_end_no_stack() -> None:
    tricky = [thread(1, "MainThread", frame('a}],"frames":[', "x}].py", 1), frame("b", "y.py", 2))]
    (dump,) = StackReader().read("a", compact(tricky))
    main = dump.main()
    assert main is not None
    assert [one.function for one in main.frames] == ['a}],"frames":[', "b"]


def test_a_thread_without_frames() -> None:
    (dump,) = StackReader().read("a", compact([thread(20391, None), *DUMP[1:]]))
    assert [len(stack.frames) for _, stack in dump.threads] == [0, 4]


def test_backward_on_a_gpu_is_in_a_thread_of_its_own() -> None:
    main = thread(1, "MainThread", frame("_engine_run_backward", "torch/autograd/graph.py", 1), frame("s", "t.py", 2))
    other = thread(
        1,
        "pt_autograd_0",
        frame("all_reduce", "torch/distributed/distributed_c10d.py", 1),
        frame("backward", "m.py", 5),
    )
    signature = StackReader().read("a", compact([other, main]))[0].signature()
    assert signature is not None
    assert signature.leaf.operation == "all_reduce"


def test_a_data_loader_is_known_by_its_frames() -> None:
    loader = [thread(1, "MainThread", frame("_worker_loop", "torch/utils/data/_utils/worker.py", 1))]
    assert role_of_process(StackReader().read("a", compact(loader))[0]) is ProcessRole.DATA_LOADER


def test_the_digest_of_a_stack_is_the_same_in_each_process_and_differs_for_another_line() -> None:
    """An agent that is started again compares its stacks with those of the agent before."""
    stack, other = (Stack((StackFrame("step", "train.py", line),)) for line in (26, 27))
    assert stack.digest == 0x5922318DE25CCC99
    assert other.digest != stack.digest


def test_several_processes_in_one_text() -> None:
    dumps = StackReader().read("a", TEXT + b"\n" + TEXT.replace(b"20391", b"20392"))
    assert [dump.pid for dump in dumps] == [20391, 20392]


@pytest.mark.parametrize(
    "data", [b"Error: Failed to suspend process", b"[{]", b'[{"pid": 1}]', b'[{"frames":[{"nam":1}]}]', b"[1, 2]"]
)
def test_what_is_no_dump_is_told(data: bytes) -> None:
    with pytest.raises(DumpError, match=r"^rank-3\.json is not what"):
        StackReader().read("rank-3.json", data)
