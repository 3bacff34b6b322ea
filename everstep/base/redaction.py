"""Hides passwords and tokens in variables and texts that are shown or kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

PATTERNS = ("*TOKEN*", "*SECRET*", "*KEY*", "*PASSWORD*")
"""Patterns for the names of variables that hold secrets. They match upper and lower case alike."""
HIDDEN = "(hidden)"
SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
"""Values that are never secrets, e.g. the value of ``TOKENIZERS_PARALLELISM``."""

_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
_NAMED = r"\w*(?:password|passwd|secret|token|api_?key|access_?key|private_?key)"
_ASSIGNED = re.compile(rf"(?i)\b({_NAMED}['\"]?\s*[=:]\s*['\"]?)(?!\(hidden)[^\s'\",;&)\]}}]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")


def masked(text: str) -> str:
    """A text with hidden passwords and tokens: those in URLs, after names like ``password=``, and after ``Bearer``."""
    text = _IN_URL.sub(rf"\1:{HIDDEN}", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def is_secret(name: str, value: str, patterns: Sequence[str] = PATTERNS) -> bool:
    """Whether a variable's name looks like that of a secret, and its value is not merely a switch such as ``true``."""
    matches = any(fnmatchcase(name.upper(), pattern.upper()) for pattern in patterns)
    return matches and value.lower() not in SWITCHES


def redacted(env: Mapping[str, str], patterns: Sequence[str] = PATTERNS) -> dict[str, str]:
    """A copy of variables that may be shown or kept: the values of secrets are hidden."""
    return {name: HIDDEN if is_secret(name, value, patterns) else value for name, value in env.items()}
