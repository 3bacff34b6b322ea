"""The scan of real logs: in pieces, with colours, progress bars, prefixes of ranks, and random bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.scan import LONGEST_LINE, LogScanner

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
        "".join(f"2026-11-21T07:36:56.123456789Z {line}" for line in RAISED.splitlines(True)),
        "ValueError: bad",
        RAISED[40:],
    ],
)
def test_text_around_an_exception_does_not_hide_it(text: str) -> None:
    verdict = scanned(text.encode())

    assert verdict.reason == "user-exception"
    assert verdict.evidence[0].text == "ValueError: bad"


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
