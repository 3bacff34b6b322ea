"""The variables and words that look like secrets, and the text that is shown in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

PATTERNS = ("*TOKEN*", "*SECRET*", "*KEY*", "*PASSWORD*")
"""Names of secrets, whatever their case."""
HIDDEN = "(hidden)"
SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
"""Values that are no secrets, as of TOKENIZERS_PARALLELISM."""

_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
_NAMED = r"\w*(?:password|passwd|secret|token|api_?key|access_?key|private_?key)"
_ASSIGNED = re.compile(rf"(?i)\b({_NAMED}['\"]?\s*[=:]\s*['\"]?)(?!\(hidden)[^\s'\",;&)\]}}]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")


def masked(text: str) -> str:
    """Text without what looks like a password or a token: in a URL, assigned to such a name, or as a bearer's."""
    text = _IN_URL.sub(rf"\1:{HIDDEN}", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def is_secret(name: str, value: str, patterns: Sequence[str] = PATTERNS) -> bool:
    """Whether a variable looks like a secret by its name; switches are none."""
    matches = any(fnmatchcase(name.upper(), pattern.upper()) for pattern in patterns)
    return matches and value.lower() not in SWITCHES


def redacted(env: Mapping[str, str], patterns: Sequence[str] = PATTERNS) -> dict[str, str]:
    """Variables that may be shown or kept: of secrets only the names."""
    return {name: HIDDEN if is_secret(name, value, patterns) else value for name, value in env.items()}
