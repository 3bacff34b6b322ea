"""The scan of real logs: in pieces, with colours, progress bars, prefixes of ranks, and random bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.scan import LONGEST_LINE, LogScanner, without_prefix

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in step\n    f()\nValueError: bad\n'
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213\n"


def scanned(*pieces: bytes, source: str = "log") -> LogVerdict:
    scanner = LogScanner(source)
    for piece in pieces:
        scanner.feed(piece)
    return first_cause([scanner.close()])


def prefixed(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))


LOG = (
    "step 1 loss 2.0\r\n" * 3
    + "10%\r20%\r30%\n2026-11-21 07:36:56,120 WARNING upload failed\n"
    + prefixed(3, RAISED)
    + prefixed(0, RAISED.replace("ValueError: bad\n", CLOSED))
    + "slurmstepd: error: *** STEP 4.0 ON m CANCELLED AT 2026-11-21T08:00:00 ***\n"
).encode()


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(LOG)), max_size=6))
def test_the_pieces_of_a_log_do_not_change_the_verdict(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(LOG)]
    pieces = [LOG[begin:end] for begin, end in itertools.pairwise(ends)]

    assert scanned(*pieces) == scanned(LOG)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*range(65), *range(123, 256)]), max_size=300).map(bytes))
def test_random_bytes_are_read_and_lines_are_counted(rubbish: bytes) -> None:
    """The random bytes are no letters, since letters may form a word of a rule."""
    verdict = scanned(rubbish + b"\n" + RAISED.encode())

    assert verdict.reason == "user-exception"
    assert verdict.lines == rubbish.count(b"\n") + 5
    assert verdict.evidence[0].line == verdict.lines


def test_mixed_lines_of_two_ranks_are_kept_apart() -> None:
    mine, other = (prefixed(rank, text).splitlines(True) for rank, text in ((3, RAISED), (7, RAISED[:-15] + CLOSED)))
    mixed = "".join(line for pair in zip(other, mine, strict=True) for line in pair)
    verdict = scanned(mixed.encode())

    assert (verdict.reason, verdict.ranks, verdict.place) == ("user-exception", (3,), "/job/train.py:7 in step")
    assert [(one.reason, one.ranks, one.consequence) for one in verdict.others] == [("peer-connection", (7,), True)]


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31m" + RAISED.replace("\n", "\x1b[0m\n\x1b[31m"),
        "\0\0\0" + RAISED,
        "99%|####|\r100%|####|\r" + RAISED,
        RAISED.replace("\n", "\r\n"),
        prefixed(3, RAISED),
        "".join(f"[default3]:{line}" for line in RAISED.splitlines(True)),
        "".join(f"3: {line}" for line in RAISED.splitlines(True)),
        *(
            "".join(f"{prefix}{line}" for line in RAISED.splitlines(True))
            for prefix in (
                "2026-11-21T07:36:56.123456789Z ",
                "2026-11-21T07:36:56.123Z: [1,3]<stderr>:",
                "Sat Nov 21 07:36:56 2026[1,3]<stderr>:",
                "[prterun-node7-4242@1,3]<stderr>: ",
                "[1,mpirank:3,algo-1]<stderr>:",
                "2026-11-21T07:36:56.123456789Z stderr F ",
                "[2026-11-21 07:36:56] 1d0c [rank=3] || ",
                "[2026-11-21T07:36:56.123456Z] 1d0c4e6f || ",
                "(Worker pid=1, ip=10.0.0.7) ",
                "(head, rank=0, pid=4100) ",
                "(Trainer(rank=3) pid=1) [rank3]: ",
                "[pod/gpt-0/main] ",
                "gpt-worker-0 pytorch ",
                "ip-10-0-0-7.internal: ",
                "[3] ",
                "Nov 21 07:36:56 node7 python[4242]: ",
                "worker-1  | ",
            )
        ),
        "ValueError: bad",
        RAISED[40:],
    ],
)
def test_text_around_an_exception_does_not_hide_it(text: str) -> None:
    verdict = scanned(text.encode())

    assert verdict.reason == "user-exception"
    assert verdict.evidence[0].text == "ValueError: bad"


@pytest.mark.parametrize("inner", ["", "[rank3]: "])
@pytest.mark.parametrize("prefix", ["gpt-{} main ", "node{}: ", "ip-10-0-0-{}: ", "2026-11-21T07:36:5{0}Z node{0}: "])
def test_mixed_lines_of_hosts_do_not_hide_the_exception(prefix: str, inner: str) -> None:
    lines = RAISED.replace("ValueError: bad", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    mixed = "".join(f"{prefix.format(host)}{inner}{line}" for line in lines.splitlines(True) for host in (0, 1))

    assert [scanned(mixed.encode()).reason, scanned(mixed.encode()).ranks] == ["cuda-ecc", (3,) if inner else ()]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("2026-11-21T07:36:56.123Z: [1,3]<stderr>:ValueError: bad", 3),
        ("[1,mpirank:3,algo-1]<stderr>:ValueError: bad", 3),
        ("[2026-11-21 07:36:56] 1d0c [rank=3] || ValueError: bad", 3),
        ("(head, rank=3, pid=4100) ValueError: bad", None),  # the rank of a node
    ],
)
def test_a_prefix_names_the_rank(line: str, rank: int | None) -> None:
    assert without_prefix(line) == ("ValueError: bad", rank)


@pytest.mark.parametrize(
    "line",
    [
        "eth0: Link down",
        "loss:     nan",
        "socket.timeout: timed out",
        "mount: /mnt/data: wrong fs type",
        "user-code raised ValueError: bad",
        "main || error",
        "loss | nan",
        "[7] NCCL INFO Connected all rings",
        "nvidia-fabricmanager[812]: failed to configure all the available GPUs",
    ],
)
def test_the_beginning_of_other_text_is_no_prefix(line: str) -> None:
    assert without_prefix(line) == (line, None)


def test_a_traceback_without_its_header_has_frames() -> None:
    above = "config:\n  lr: 3\n"
    frames = RAISED.split("\n", 1)[1]

    assert scanned(frames.encode()).place == "/job/train.py:7 in step"
    assert scanned(f"{above}ValueError: busy, retrying in 5 s\nstep 1\nKeyError: 3\n".encode()).evidence[0].line == 5


def test_a_line_without_an_end_is_cut() -> None:
    scanner = LogScanner("log")
    for _ in range(4):
        scanner.feed(b"x" * LONGEST_LINE)
    scanner.feed(b"\nOSError: [Errno 28] No space left on device\n")

    assert first_cause([scanner.close()]).reason == "disk-full"


def test_a_traceback_without_an_end_hides_no_later_line() -> None:
    cut = RAISED.replace("ValueError: bad\n", "    more()\n" * 1000)
    verdict = scanned((cut + "OSError: [Errno 28] No space left on device\n").encode())

    assert verdict.reason == "disk-full"


def test_the_rank_of_a_log_is_in_its_name() -> None:
    for name, ranks in (("logs/rank-5.log", (5,)), ("x/attempt_0/6/stderr.log", (6,)), ("slurm-42.out", ())):
        assert scanned(RAISED.encode(), source=name).ranks == ranks


def test_torch_prints_the_cause_in_another_process_after_the_exception() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n    for batch in loader:\n'
        "KeyError: Caught KeyError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "/job/data.py", line 3, in __getitem__\n    d[k]\n'
        "KeyError: 'tokens'\n"
    )
    assert scanned(text.encode()).place == "/job/data.py:3 in __getitem__"


def test_a_further_line_of_nccl_names_the_cause() -> None:
    text = RAISED.replace(
        "ValueError: bad",
        "torch.distributed.DistBackendError: NCCL error in: P.cpp:1, unhandled system error, NCCL version 2.21\n"
        "ncclSystemError: System call failed\nLast error:\nsocketProgress: Connection closed by remote peer m2<4>",
    )
    assert scanned(text.encode()).reason == "peer-connection"
