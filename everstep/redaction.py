"""Which variables look like secrets, and what is shown in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

PATTERNS = ("*TOKEN*", "*SECRET*", "*KEY*", "*PASSWORD*")
"""Names of secrets, whatever their case (ours)."""
HIDDEN = "(hidden)"
SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
"""Values that keep no secret, as of TOKENIZERS_PARALLELISM."""


def is_secret(name: str, value: str, patterns: Sequence[str] = PATTERNS) -> bool:
    """Whether a variable looks like a secret by its name; switches are none."""
    named = any(fnmatchcase(name.upper(), pattern.upper()) for pattern in patterns)
    return named and value.lower() not in SWITCHES


def redacted(env: Mapping[str, str], patterns: Sequence[str] = PATTERNS) -> dict[str, str]:
    """Variables to be shown or kept: of secrets the name only."""
    return {name: HIDDEN if is_secret(name, value, patterns) else value for name, value in env.items()}
