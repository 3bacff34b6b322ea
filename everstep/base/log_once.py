"""Remembers which errors were logged, so that a repeated error is logged once."""

from __future__ import annotations


class LoggedErrors:
    """The kinds of errors that were logged already, by subject."""

    def __init__(self) -> None:
        self._logged: dict[str, set[str]] = {}

    def is_new(self, key: str, error: BaseException) -> bool:
        """Whether an error of this type is the first for a subject; from now on it counts as logged.

        Messages are not compared, since they may contain numbers that change every time.
        """
        kind = type(error).__name__
        kinds = self._logged.setdefault(key, set())
        if kind in kinds:
            return False
        kinds.add(kind)
        return True

    def recovered(self, key: str) -> None:
        """Note that a subject works again or is gone, so that its next error is logged."""
        self._logged.pop(key, None)
