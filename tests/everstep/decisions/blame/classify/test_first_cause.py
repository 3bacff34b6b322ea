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
