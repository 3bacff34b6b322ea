"""Words of closed lists that grow from release to release, as messages carry them.

During an upgrade two releases run side by side, and after a downgrade the older
one reads what the newer one wrote. A word that this release does not know is kept
as it is: shown, passed on and stored again, and equal to no word that is known.
It never makes a message unreadable.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Words(StrEnum):
    """Base of the enums that cross Temporal or are stored: any other text becomes a member of its own, not listed."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @property
    def known(self) -> bool:
        """Whether this release knows the word."""
        return type(self).__members__.get(self.name) is self
