"""This module parses the output and the exit code of ``dcgmi diag -j`` (DCGM 3 and 4).

The JSON has ``DCGM Diagnostic`` (DCGM 3: ``DCGM GPU Diagnostic``) with a list of ``test_categories``. Each category has
``tests``, and each test has ``results`` of GPUs. A status is ``Pass``, ``Skip`` or ``Fail``. A warning is also printed
as ``Fail``, so only ``error_severity`` shows how severe it is. The exit code is DCGM's return value modulo 256.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from agent.monitor import programs
from everstep.errors import CannotInspect

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
TESTED = {0, 205}
"""Exit codes after a complete diagnostic: it passed, or GPUs have to be isolated (-51)."""
NOT_TESTED = {
    198: "the test is not available on this machine (-58)",
    203: "the diagnostic was killed (-53)",
    204: "the diagnostic's program is not installed (-52)",
    217: "another diagnostic is running (-39)",
    226: "the diagnostic itself failed (-30)",
    235: "there is no connection to DCGM's host engine (-21)",
}
NO_VERDICT_IDS = {90: "EUD was not run as root", 92: "EUD did not end in time"}
"""Ids of errors that mean that a part could not be tested (``DCGM_FR_EUD_NON_ROOT_USER``, ``DCGM_FR_EUD_TIMEOUT``)."""


class Severity(IntEnum):
    """The severity of an error (``dcgm_errors.h`` of DCGM 4)."""

    NONE = 0
    MONITOR = 1
    ISOLATE = 2
    UNKNOWN = 3
    TRIAGE = 4
    CONFIG = 5
    RESET = 6


@dataclass(frozen=True, slots=True)
class DcgmFailure:
    """One error of one part."""

    test: str
    part: str
    """The part, e.g. ``GPU 3`` with DCGM's number; empty: the complete machine."""
    text: str
    severity: Severity
    error: int = 0
    """Id of the error; 0: the output has none."""


@dataclass(frozen=True, slots=True)
class DcgmReport:
    """The results of a diagnostic."""

    passed: int
    """Number of results that passed."""
    skipped: tuple[str, ...]
    """Names of tests that were skipped on every GPU."""
    failures: tuple[DcgmFailure, ...]
    version: str = ""


def parsed(text: str, code: int) -> DcgmReport:
    """Parse the output of a diagnostic.

    Args:
        text: Its standard output and standard error.
        code: Its exit code.

    Raises:
        CannotInspect: the diagnostic did not test the GPUs, or its output has an unknown form.
    """
    if code not in TESTED:
        why = NOT_TESTED.get(code, "the code is unknown")
        raise CannotInspect(f"dcgmi ended with code {code}: {why}; {programs.excerpt(text)}")
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[begin : end + 1])
        root = next(found[name] for name in ROOTS if name in found)
        if error := root.get("runtime_error"):
            raise CannotInspect(f"DCGM could not test: {error}")
        tests = [test for category in root["test_categories"] for test in category["tests"]]
        results = [(test["name"], result) for test in tests for result in test["results"]]
        failures = [failure for name, result in results for failure in _failures(name, result)]
        statuses: dict[str, set[str]] = {}
        for name, result in results:
            statuses.setdefault(name, set()).add(str(result["status"]).lower())
        version = str(found.get("metadata", {}).get("version", ""))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise CannotInspect(f"dcgmi does not report the health of the GPUs: {programs.excerpt(text)}") from None
    passed = sum(str(result["status"]).lower() == "pass" for _, result in results)
    skipped = tuple(name for name, seen in statuses.items() if seen == {"skip"})
    return DcgmReport(passed, skipped, tuple(failures), version)


def _failures(test: str, result: Mapping[str, Any]) -> Iterator[DcgmFailure]:
    if str(result["status"]).lower() not in {"fail", "warn"}:
        return
    part = f"{result['entity_group']} {result['entity_id']}" if "entity_id" in result else ""
    part = part or (f"GPU {result['gpu_ids']}" if result.get("gpu_ids") else "")
    warnings = result.get("warnings") or ["it failed without a reason"]
    for warning in [warnings] if isinstance(warnings, str | dict) else warnings:
        said = warning if isinstance(warning, dict) else {"warning": str(warning)}
        number = int(said.get("error_severity", Severity.UNKNOWN))
        severity = Severity(number) if number in set(Severity) else Severity.UNKNOWN
        yield DcgmFailure(test, part, str(said.get("warning", "")), severity, int(said.get("error_id", 0)))
