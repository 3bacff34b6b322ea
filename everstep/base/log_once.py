"""Log an error once, and not again at every round."""

from __future__ import annotations


class Once:
    """Which kinds of errors were logged already, by whom they concern."""

    def __init__(self) -> None:
        self._logged: dict[str, set[str]] = {}

    def new(self, key: str, error: BaseException) -> bool:
        """Whether an error of this kind was not logged for them yet; from now on it counts as logged.

        By its kind: a message may hold numbers that change at every round.
        """
        kind = type(error).__name__
        kinds = self._logged.setdefault(key, set())
        if kind in kinds:
            return False
        kinds.add(kind)
        return True

    def well(self, key: str) -> None:
        """They work again, or are gone: the next error is new."""
        self._logged.pop(key, None)
