"""The labelled logs, and how well the rules do on them.

python -P -m tests.everstep.decisions.blame.classify.labelled_logs     # the table for docs/concepts/classification.md
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from everstep.decisions.blame.classify.first_cause import LogVerdict, first_cause
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.system.log_files import log_files, pieces

FOLDER = Path(__file__).parent / "labelled"
MATCHER = LineMatcher()


@dataclass(frozen=True, slots=True)
class Labelled:
    """A log, or a folder with a log for each rank, and what it is of."""

    path: str
    fault: str
    part: str
    exit_code: int | None

    def verdict(self) -> LogVerdict:
        """What the rules say."""
        logs = []
        for name in log_files([str(FOLDER / self.path)]):
            scanner = LogScanner(name, matcher=MATCHER)
            for piece in pieces(name):
                scanner.feed(piece)
            logs.append(scanner.close())
        return first_cause(logs, self.exit_code)


def labelled() -> list[Labelled]:
    """All of them."""
    entries = tomllib.loads((FOLDER / "labels.toml").read_text())["log"]
    return [Labelled(one["path"], one["class"], one["part"], one.get("exit_code")) for one in entries]


def table() -> str:
    """Precision and recall of each class, and what was taken for what, as in docs/concepts/classification.md."""
    pairs = Counter((one.fault, str(one.verdict().fault)) for one in labelled())
    rows = ["| class | logs | precision | recall | taken for |", "|---|---|---|---|---|"]
    for fault in sorted({fault for pair in pairs for fault in pair}):
        logs = sum(count for (wanted, _), count in pairs.items() if wanted == fault)
        said = sum(count for (_, found), count in pairs.items() if found == fault)
        right = pairs[fault, fault]
        wrong = ", ".join(f"{found} {n}" for (wanted, found), n in sorted(pairs.items()) if fault == wanted != found)
        precision, recall = (f"{right / whole:.2f}" if whole else "-" for whole in (said, logs))
        rows.append(f"| {fault} | {logs} | {precision} | {recall} | {wrong} |")
    right = sum(count for (wanted, found), count in pairs.items() if wanted == found)
    return "\n".join([*rows, f"| all | {pairs.total()} | | {right / pairs.total():.2f} | |"])


if __name__ == "__main__":
    print(table())
