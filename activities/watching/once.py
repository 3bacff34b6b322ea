"""Say a trouble once, and not at every round in which it is met again."""

from __future__ import annotations


class Once:
    """Which troubles of whom were said already."""

    def __init__(self) -> None:
        self._said: dict[str, set[str]] = {}

    def new(self, whose: str, trouble: BaseException) -> bool:
        """Whether a trouble of this kind was not said of them yet; from now on it was.

        By its kind: a message may hold numbers that change at every round.
        """
        kind = type(trouble).__name__
        said = self._said.setdefault(whose, set())
        if kind in said:
            return False
        said.add(kind)
        return True

    def well(self, whose: str) -> None:
        """They are well again, or gone: what comes next is new."""
        self._said.pop(whose, None)
