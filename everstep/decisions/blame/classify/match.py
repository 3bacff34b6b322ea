"""Which rule a line belongs to, quickly: thousands of ranks say the same with other numbers."""

from __future__ import annotations

import re

from everstep.decisions.blame.classify.all import LOG_RULES
from everstep.decisions.blame.classify.rule import LogRule

KEPT = 8192
"""Shapes of lines whose rule is remembered."""
READ = 2000
"""Characters of a line that are looked at: a longer one is cut, its end is kept too."""
# Numbers that decide are short: of an Xid, a signal, an errno, an exit code.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.:,]\d+)+|\d{4,}|(?<=[Rr]ank )\d+|(?<=\[rank)\d+|(?<=\[default)\d+")


class LineMatcher:
    """Finds the rule of a line, and remembers it for lines of the same shape."""

    def __init__(self, rules: tuple[LogRule, ...] = LOG_RULES) -> None:
        self._rules = rules
        self._known: dict[str, LogRule | None] = {}

    def rule_of(self, line: str) -> LogRule | None:
        """The first rule that a cleaned line matches; None: none does."""
        if len(line) > READ:
            line = line[: READ - READ // 4] + line[-READ // 4 :]
        shape = _VARYING.sub("0", line)
        try:
            return self._known[shape]
        except KeyError:
            pass
        lowered = line.lower()
        found = next((rule for rule in self._rules if rule.is_in_hinted(line, lowered)), None)
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[shape] = found
        return found
