"""Defines the reason codes of findings from a comparison of machines."""

from __future__ import annotations

from everstep.model.finding import Health, Owner, Reason, Remedy

OTHER_BITS = Reason(
    "other-bits",
    "it computes other bits than most machines of its kind",
    remedy=Remedy.REPLACE,
    sure=True,
    source="ByteRobust, section 4.2",
)
UNCOMPARED = Reason(
    "bits-not-compared",
    "whether it computes right is not known: too few machines of its kind agree",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
FAILS_WITH_ALL = Reason(
    "fails-with-others",
    "it failed with two machines that work with others",
    remedy=Remedy.REPLACE,
    sure=True,
    source="ByteRobust, section 4.2",
)
BAD_LINK = Reason(
    "bad-link",
    "the link between it and another machine does not work, and both work with others",
    owner=Owner.NETWORK,
    remedy=Remedy.CHECK_SETUP,
)
FAILS_UNSURE = Reason(
    "failed-with-another",
    "it failed with another machine, and which of them is at fault is not known",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
SLOW = Reason("far-slower", "a bandwidth is far below that of other machines", remedy=Remedy.REPLACE)
LOW = Reason("slower", "a bandwidth is below that of other machines", owner=Owner.UNKNOWN, verdict=Health.UNKNOWN)
FAILS_ALONE = Reason(
    "fails-where-others-pass",
    "a test breaks on it, and passes on most machines of its kind",
    remedy=Remedy.REPLACE,
)
SILENT = Reason(
    "not-diagnosed",
    "its agent did not answer, or refused",
    owner=Owner.UNKNOWN,
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
)

JUDGED = (OTHER_BITS, UNCOMPARED, FAILS_WITH_ALL, FAILS_UNSURE, BAD_LINK, SLOW, LOW, FAILS_ALONE, SILENT)
"""All of these reason codes."""
