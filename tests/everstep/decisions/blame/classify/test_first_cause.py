"""The first cause of a failure, found in many logs. If the logs do not show it, it is unknown."""

from __future__ import annotations

import pytest

from everstep.decisions.blame.classify.candidates import read_exit_code
from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rule import FaultClass
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.model.finding import Owner

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213\n"
WAITED = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600001 milliseconds\n"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in step\nRuntimeError: no batch\n'
FULL = "OSError: [Errno 28] No space left on device\n"


def verdict_of(*texts: str, exit_code: int | None = None) -> LogVerdict:
    logs = []
    for rank, text in enumerate(texts):
        scanner = LogScanner(f"rank-{rank}.log")
        scanner.feed(text.encode())
        logs.append(scanner.close())
    return first_cause(logs, exit_code)


def test_one_cause_among_a_thousand_consequences() -> None:
    texts = [WAITED.format(rank) if rank % 2 else CLOSED for rank in range(1000)]
    texts[417] = MEMORY
    verdict = verdict_of(*texts)

    assert (verdict.fault, verdict.owner, verdict.ranks) == (FaultClass.GPU_OUT_OF_MEMORY, Owner.CODE, (417,))
    assert [(one.reason, one.count) for one in verdict.others] == [
        ("nccl-watchdog-timeout", 499),
        ("peer-connection", 500),
    ]


def test_consequences_alone_are_reported_as_such() -> None:
    verdict = verdict_of(CLOSED, WAITED.format(1))

    assert (verdict.fault, verdict.owner, verdict.consequence) == (FaultClass.HANG, Owner.UNKNOWN, True)


def test_times_show_the_first_of_two_causes_unless_clocks_may_differ_by_more() -> None:
    early, late, same = (f"2026-11-21 07:{minute} ERROR x failed\n" for minute in ("36:00", "37:00", "36:00,500"))

    assert verdict_of(late + FULL, early + MEMORY).reason == "gpu-out-of-memory"
    assert verdict_of(early + FULL, late + MEMORY).reason == "disk-full"
    unsure = verdict_of(early + FULL, same + MEMORY)
    assert (unsure.reason, unsure.owner) == ("several-causes", Owner.UNKNOWN)
    assert {one.reason for one in unsure.others} == {"disk-full", "gpu-out-of-memory"}
    assert verdict_of(FULL, MEMORY).fault is FaultClass.UNKNOWN


def test_in_one_log_the_first_line_is_the_cause() -> None:
    assert verdict_of(FULL + MEMORY).reason == "disk-full"
    assert verdict_of("NVRM: Xid (PCI:0000:05:00): 79, pid=1\n" + MEMORY).reason == "xid-off-the-bus"


def test_a_line_that_the_program_survived_is_no_cause() -> None:
    steps = "".join(f"step {step} loss 2.0\n" for step in range(300))

    assert verdict_of(FULL + steps + "ValueError: bad\n").reason == "user-exception"
    assert verdict_of("WARNING retrying: No space left on device\nValueError: bad\n").reason == "user-exception"
    assert verdict_of(FULL + steps, exit_code=0).fault is FaultClass.NO_FAILURE
    unsure = verdict_of(FULL + steps)
    assert (unsure.fault, [one.reason for one in unsure.others]) == (FaultClass.UNKNOWN, ["disk-full"])


def test_the_name_of_a_setting_is_no_log_level() -> None:
    line = (
        "torch.distributed.DistBackendError: NCCL error in: P.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO)"
    )

    assert verdict_of(line).reason == "nccl-system-error"
    assert verdict_of("ConnectionError: busy, retrying in 5 s\nstep 1\nKeyError: 3\n").evidence[0].line == 3


CURL = "2026-11-21 07:36:5{}.308: E tensorflow/core/platform/s3/aws_logging.cc:60] Curl returned error code 28\n"


def test_retries_of_a_client_are_a_cause_only_right_before_the_end() -> None:
    tries = "".join(CURL.format(second) for second in range(3))
    other = "reading a file\n" * 30

    assert verdict_of(tries + RAISED).reason == "remote-storage-retried"
    assert verdict_of(tries).owner is Owner.STORAGE
    assert verdict_of(CURL.format(1) + RAISED).reason == "user-exception"
    assert verdict_of(tries + other + RAISED).reason == "user-exception"
    assert verdict_of(CURL.format(1) + other + CURL.format(2) + other + CURL.format(3) + RAISED).owner is Owner.CODE


INDEX = "/job/Megatron-LM/megatron/core/datasets/indexed_dataset.py"


@pytest.mark.parametrize(
    ("file", "source", "exception", "reason"),
    [
        (
            INDEX,
            "assert self.sequence_lengths.shape[0] == self.document_indices[-1]",
            "AssertionError",
            "dataset-index",
        ),
        (INDEX, "return numpy.frombuffer(", "ValueError: buffer is smaller than requested size", "dataset-index"),
        (INDEX, "assert not mmap", "AssertionError", "user-exception"),
        ("/job/train.py", "assert self.sequence_lengths.shape[0] == 3", "AssertionError", "user-exception"),
        (INDEX, "header = open(path)", "FileNotFoundError: [Errno 2] No such file or directory: '/x'", "missing-file"),
    ],
)
@pytest.mark.parametrize("header", ["", "Traceback (most recent call last):\n"])
def test_a_frame_shows_that_an_index_does_not_fit_its_data(
    header: str, file: str, source: str, exception: str, reason: str
) -> None:
    text = f'{header}  File "{file}", line 293, in __init__\n    {source}\n{exception}\n'

    assert verdict_of(text).reason == reason


JAVA = "hdfsExists: invokeMethod((Lorg/apache/hadoop/fs/Path;)Z) error:\n{}\n\tat org.apache.hadoop.ipc.Client.call\n"
TERMINATED = "(autoscaler +4m2s) Instance k-1 (node IP: 10.2.1.9) will be terminated soon (reason: {}).\n"
NO_PLACE = "RuntimeError: Failed to create placement group with 1 bundles (requiring 2.0 GPUs) in 180 seconds.\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.\n", "nvml-gpu-lost"),
        ("ValueError: Failed to initialize NVML: Driver/library version mismatch\n", "user-exception"),
        ("WARNING Failed to initialize NVML: Driver/library version mismatch\nKeyError: 3\n", "user-exception"),
        (JAVA.format("java.lang.NoSuchMethodError: com.google.protobuf.Message"), "java-class-clash"),
        (JAVA.format("java.net.ConnectException: Call From m1 to m2:8020 failed"), "hdfs-call-failed"),
        (TERMINATED.format("kubernetes-pod-termination") + NO_PLACE, "ray-node-terminated"),
        (TERMINATED.format("idle-termination") + NO_PLACE, "ray-placement-timeout"),
        (TERMINATED.format("idle-termination") + "KeyError: 3\n", "user-exception"),
        ("OSError: cannot identify image file <_io.BufferedReader name='/data/7.JPEG'>\n", "damaged-data"),
        ("WARNING cannot identify image file '/data/7.JPEG', skipping\nKeyError: 3\n", "user-exception"),
        ("openai.APIConnectionError: Connection error.\n", "external-service"),
        ("openai.BadRequestError: Error code: 400\n", "user-exception"),
        ("WARNING openai.RateLimitError: Error code: 429, retrying in 4 s\nKeyError: 3\n", "user-exception"),
    ],
)
def test_a_line_and_one_that_looks_similar(text: str, reason: str) -> None:
    assert verdict_of(text).reason == reason


def test_an_exception_in_a_handler_is_not_the_cause() -> None:
    chained = f"{CLOSED}\nDuring handling of the above exception, another exception occurred:\n\nValueError: cleanup\n"
    own = f"KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{CLOSED}"

    assert verdict_of(chained).reason == "peer-connection"
    assert verdict_of(own).reason == "user-exception"


@pytest.mark.parametrize(
    ("text", "code", "fault"),
    [
        ("step 1\n", 137, FaultClass.KILLED),
        ("step 1\n", -9, FaultClass.KILLED),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n", 137, FaultClass.HOST_OUT_OF_MEMORY),
        ("step 1\n", 143, FaultClass.TERMINATED),
        (
            "error: *** STEP 1.0 ON m CANCELLED AT 2026-11-21T07:36:56 DUE TO PREEMPTION ***\n",
            143,
            FaultClass.PREEMPTED,
        ),
        ("step 1\n", 139, FaultClass.CRASHED),
        (WAITED.format(1), 134, FaultClass.HANG),
        (CLOSED, 137, FaultClass.KILLED),
        ("step 1\n", 124, FaultClass.HANG),
        ("step 1\n", 1, FaultClass.UNKNOWN),
        ("step 1\n", 0, FaultClass.NO_FAILURE),
        ("", None, FaultClass.UNKNOWN),
    ],
)
def test_the_class_of_an_exit_code(text: str, code: int | None, fault: FaultClass) -> None:
    verdict = verdict_of(text, exit_code=code)

    assert verdict.fault is fault
    assert "memory" not in verdict.headline or fault is FaultClass.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize("code", range(-70, 256))
def test_every_exit_code_has_a_text(code: int) -> None:
    assert read_exit_code(code).text
