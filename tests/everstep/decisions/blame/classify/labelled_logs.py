"""The labelled logs."""

from __future__ import annotations

import tomllib
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
