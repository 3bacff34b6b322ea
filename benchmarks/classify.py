"""Measures how fast logs are classified.

There are four kinds of logs: a long log that has a problem only at its end; a log in which every line has a word of a
rule; the ends of the outputs of 10,000 ranks; and a log in which 1,000 ranks raise exceptions at once.

One process works in memory, without disks and decompression. The aims limit CPU time. Nothing here waits, so the
elapsed time on an idle core is the same.

    python -P -m benchmarks.classify
    python -P -m benchmarks.classify --quick --json
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable

from benchmarks.common import Row, Spread, say, show, show_json
from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner

SPEED_AIM_MB_S = 50.0
TAILS_AIM_S = 2.0
TAIL_BYTES = 4096
FEED = 1 << 20

FRAMES = "".join(
    f'  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line {1700 + n}, in _call_impl\n'
    "    return forward_call(*args, **kwargs)\n"
    for n in range(12)
)
CLOSED = "RuntimeError: [/build/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.{}.{}]:{}\n"


def quiet_log(megabytes: int, line: str) -> bytes:
    """Return a log with lines of training and a traceback at the end."""
    draw = random.Random(7)
    lines = [
        line.format(step=step, second=step % 60, loss=draw.random(), rate=draw.randint(10_000, 99_999))
        for step in range(20_000)
    ]
    block = "".join(lines).encode()
    repeated = block * (megabytes * 1_000_000 // len(block) + 1)
    return (
        repeated[: megabytes * 1_000_000]
        + b'\nTraceback (most recent call last):\n  File "t.py", line 3\nKeyError: 3\n'
    )


def tails(ranks: int) -> list[bytes]:
    """Return the ends of the ranks' outputs: one rank ran out of GPU memory, and the others lost their connection to
    it."""
    found = []
    for rank in range(ranks):
        last = CLOSED.format(rank // 250, rank % 250, 20_000 + rank)
        if rank == ranks // 3:
            last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        steps = "".join(f"2026-11-21 07:36:{n:02d},120 INFO step {rank + n} loss 2.{n}\n" for n in range(60))
        text = steps + "".join(
            f"[rank{rank}]: {line}\n" for line in f"Traceback (most recent call last):\n{FRAMES}{last}".splitlines()
        )
        found.append(text.encode()[-TAIL_BYTES:])
    return found


def merged(ranks: int) -> bytes:
    """Return the output of all ranks in one log, a line of each rank in turn."""
    each = [tail.decode().splitlines() for tail in tails(ranks)]
    shortest = min(map(len, each))
    rows = zip(*(lines[-shortest:] for lines in each), strict=True)
    return "".join(line + "\n" for row in rows for line in row).encode()


def scan(data: bytes) -> LogVerdict:
    """Classify one log, which is read in pieces as from a file."""
    scanner = LogScanner("log")
    for at in range(0, len(data), FEED):
        scanner.feed(data[at : at + FEED])
    return first_cause([scanner.close()])


def of_ranks(data: list[bytes]) -> LogVerdict:
    """Classify a failure by the logs of all ranks, one log for each rank."""
    matcher = LineMatcher()
    logs = []
    for rank, tail in enumerate(data):
        scanner = LogScanner(f"rank-{rank}", matcher=matcher)
        scanner.feed(tail)
        logs.append(scanner.close())
    return first_cause(logs)


def timed(name: str, run: Callable[[], LogVerdict], reason: str, times: int) -> Spread:
    """Return the CPU seconds of several runs.

    Raises:
        AssertionError: a run finds another reason.
    """
    say(name)
    seconds = []
    for _ in range(times):
        began = time.process_time()
        verdict = run()
        seconds.append(time.process_time() - began)
        if verdict.reason != reason:
            raise AssertionError(f"{name}: {verdict.headline} instead of {reason}")
    return Spread.of(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use a tenth of the data and fewer runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    megabytes, ranks, times = (20, 1_000, 3) if options.quick else (200, 10_000, 5)
    quiet = quiet_log(
        megabytes, "2026-11-21 07:36:{second:02d} INFO trainer: step {step} loss {loss:.4f} tokens/s {rate}\n"
    )
    loud = quiet_log(megabytes // 10, "07:36:{second:02d} WARNING step {step}: loader timeout, failed {rate} times\n")
    ends, together = tails(ranks), merged(min(ranks, 1_000))
    rows = []
    for name, data, reason, aim in (
        ("a quiet log", quiet, "user-exception", SPEED_AIM_MB_S),
        ("every line has a word of rules", loud, "user-exception", None),
        (f"{min(ranks, 1_000)} ranks raise in one log", together, "gpu-out-of-memory", None),
    ):
        spread = timed(name, lambda data=data: scan(data), reason, times)  # type: ignore[misc]
        speed = len(data) / 1e6 / spread.median
        rows.append(Row(f"{name}, median", "MB/s", speed, None, aim, "ours", larger=True))
    spread = timed(f"{ranks} tails", lambda: of_ranks(ends), "gpu-out-of-memory", times)
    aim = TAILS_AIM_S * ranks / 10_000
    rows.append(Row(f"{ranks} ranks' tails of 4 KiB, median", "s", spread.median, None, aim, "ours"))
    rows.append(Row(f"{ranks} ranks' tails of 4 KiB, maximum", "s", spread.maximum, None, None, "ours"))
    tracemalloc.start()
    scan(quiet)
    rows.append(Row("memory while a quiet log is read, at most", "MB", tracemalloc.get_traced_memory()[1] / 1e6))
    if options.json:
        show_json("classify", rows)
    else:
        show("classify", rows)


if __name__ == "__main__":
    main()
