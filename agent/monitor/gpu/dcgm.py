"""This module inspects the results of DCGM's health watches, on machines where DCGM runs.

``dcgmi health -c -j`` prints a tree (``dcgmi/Health.cpp`` and ``DcgmiOutput.h`` of DCGM 4). Its ``body`` has ``Overall
Health`` with a ``value``, and a section for each kind of part that has incidents, e.g. ``GPU``. The ``children`` of a
section are the parts by their numbers. The child of a part is ``Errors``, and the children of ``Errors`` are the
watches, e.g. ``Memory system``. A watch has a ``value`` and, in ``overflow``, the lines of its text. Values are
``Healthy``, ``Warning``, ``Failure``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from agent.monitor import programs
from agent.monitor.gpu.reading import item_of
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.errors import CannotInspect
from everstep.model.finding import Finding, Health, Reason, Remedy

FAILURE = Reason(
    "dcgm-failure", "a health watch of DCGM failed", remedy=Remedy.RESET_GPU, source="DCGM: health result FAIL"
)
WARNING = Reason(
    "dcgm-warning",
    "a health watch of DCGM warns",
    remedy=Remedy.WATCH,
    verdict=Health.UNKNOWN,
    source="DCGM: health result WARN",
)
OVERALL = "Overall Health"
HEALTHY = "Healthy"
VERDICTS = {"Warning": WARNING, "Failure": FAILURE}
GPU = "GPU"
NOT_WATCHED = re.compile(r"watches not enabled", re.IGNORECASE)
NOT_RUNNING = re.compile(
    r"unable to establish a connection|unable to connect|host engine is not running", re.IGNORECASE
)
LISTED = re.compile(r"^\|\s*(?P<id>\d*)\s*\|\s*(?P<what>[\w ]+):\s*(?P<value>\S+)")
"""A row of ``dcgmi discovery -l``."""


class DcgmLimits(Limits):
    """Settings of the inspection by DCGM."""

    interval_s: float = Field(default=30.0, gt=0)
    """Period, seconds; DCGM itself updates its results every 30 s."""
    deadline_s: float = Field(default=60.0, gt=0)
    """An inspection that takes longer is reported as hanging, seconds; it runs ``dcgmi`` up to four times."""
    answer_s: float = Field(default=10.0, gt=0)
    """Longest time that one run of ``dcgmi`` may take, seconds."""
    command: str = "dcgmi"
    """Name or path of the program."""
    group: int = Field(default=0, ge=0)
    """Id of DCGM's group of GPUs; group 0 has all GPUs."""
    set_watches: bool = True
    """Whether to turn on all health watches if none is on."""


@dataclass(frozen=True, slots=True)
class DcgmIncident:
    """A warning or failure of a health watch about one part."""

    kind: str
    """Kind of the part, e.g. ``GPU``; empty: the whole machine."""
    number: str
    reason: Reason
    text: str


class DcgmInspection(Inspection):
    """Asks DCGM's host engine for the results of its health watches."""

    name: ClassVar[str] = "dcgm"
    inspects: ClassVar[str] = "the results of DCGM's health watches for GPUs and NVSwitches"
    reasons: ClassVar[tuple[Reason, ...]] = (FAILURE, WARNING)
    limits_type: ClassVar[type[Limits]] = DcgmLimits

    def inspect(self) -> InspectionResult:
        """Read the results once, by running ``dcgmi``."""
        if shutil.which(self.limits.command) is None:
            return InspectionResult(note=f"{self.limits.command} is not installed")
        text = self._run("health", "-g", str(self.limits.group), "-c", "-j")
        if NOT_WATCHED.search(text) and self.limits.set_watches:
            self._run("health", "-g", str(self.limits.group), "-s", "a")
            text = self._run("health", "-g", str(self.limits.group), "-c", "-j")
        if NOT_RUNNING.search(text) and not self.kept.get("ran"):
            return InspectionResult(note="DCGM does not run")
        incidents = parsed(text)
        self.kept["ran"] = True
        parts: dict[tuple[str, str], list[DcgmIncident]] = {}
        for incident in incidents:
            parts.setdefault((self._item(incident), incident.reason.code), []).append(incident)
        return InspectionResult([self._of_part(item, several) for (item, _), several in parts.items()])

    def _of_part(self, item: str, incidents: list[DcgmIncident]) -> Finding:
        first = incidents[0]
        return self.finding(first.reason, item, *(incident.text for incident in incidents), text=f"DCGM: {first.text}")

    def _item(self, incident: DcgmIncident) -> str:
        """Return the name that other inspections have for the part."""
        if incident.kind != GPU:
            return f"{incident.kind} {incident.number}".strip()
        addresses = self.kept.get("places", {})
        if incident.number not in addresses:
            addresses = self.kept["places"] = pci_addresses_of(self._run("discovery", "-l"))
        if address := addresses.get(incident.number):
            return item_of(address, -1)
        return f"GPU {incident.number} of DCGM"

    def _run(self, *arguments: str) -> str:
        return programs.run([self.limits.command, *arguments], self.limits.answer_s).output


def parsed(text: str) -> list[DcgmIncident]:
    """Parse the output of ``dcgmi health -c -j``; an empty list means that everything is healthy.

    Raises:
        CannotInspect: DCGM could not test, or the output has an unknown form.
    """
    begin, end = text.find("{"), text.rfind("}")
    try:
        body = json.loads(text[begin : end + 1])["body"]
        overall = body[OVERALL]["value"]
        incidents = [
            incident for kind, section in body.items() if kind != OVERALL for incident in _of_section(kind, section)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotInspect(f"dcgmi does not report the health of the GPUs: {programs.excerpt(text)}") from None
    if overall != HEALTHY and overall not in VERDICTS:
        raise CannotInspect(f"dcgmi could not test: overall health is {overall!r}")
    if overall != HEALTHY and not incidents:
        incidents = [DcgmIncident("", "", VERDICTS[overall], f"overall health: {overall}")]
    return incidents


def pci_addresses_of(text: str) -> dict[str, str]:
    """Parse the output of ``dcgmi discovery -l``: DCGM's number of each GPU → its PCI address."""
    addresses, number = {}, ""
    for line in text.splitlines():
        if match := LISTED.match(line):
            number = match["id"] or number
            if match["what"] == "PCI Bus ID" and number:
                addresses[number] = match["value"]
    return addresses


def _of_section(kind: str, section: Mapping[str, Any]) -> Iterator[DcgmIncident]:
    for number, part in section.get("children", {}).items():
        watches = part.get("children", {}).get("Errors", {}).get("children", {})
        for watch, state in watches.items():
            if reason := VERDICTS.get(state["value"]):
                lines = " ".join(map(str, state.get("overflow", [])))
                yield DcgmIncident(kind, number, reason, f"{watch}: {lines or state['value']}")
        if not watches and (reason := VERDICTS.get(part.get("value", ""))):
            yield DcgmIncident(kind, number, reason, f"{kind} {number}: {part['value']}")
