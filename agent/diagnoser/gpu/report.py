"""What ``dcgmi diag -j`` prints, and what its exit code says (DCGM 3 and 4).

The JSON has ``DCGM Diagnostic`` (DCGM 3: ``DCGM GPU Diagnostic``) with ``test_categories``, each with ``tests``, each
with ``results`` of GPUs. A status is ``Pass``, ``Skip`` or ``Fail``, and a warning is printed as ``Fail`` too: what
decides is ``error_severity``. The exit code is that of DCGM's own return value, modulo 256.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from everstep.errors import CannotInspect

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
TESTED = {0, 205}
"""Exit codes after which the JSON says how the GPUs are: all went well, or GPUs are to be isolated (-51)."""
NOT_TESTED = {
    198: "no such test is available here (-58)",
    203: "the diagnostic was killed (-53)",
    204: "the diagnostic's program is not installed (-52)",
    217: "a diagnostic runs already (-39)",
    226: "the diagnostic failed by itself (-30)",
    235: "there is no connection to DCGM's host engine (-21)",
}
NO_VERDICT_IDS = {90: "EUD was not run as root", 92: "EUD did not end in time"}
"""Ids of errors that say that it could not be tested (``DCGM_FR_EUD_NON_ROOT_USER``, ``DCGM_FR_EUD_TIMEOUT``)."""


class Severity(IntEnum):
    """How severe an error is (``dcgm_errors.h`` of DCGM 4)."""

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
    """``GPU 3``, numbered as DCGM does; empty: the machine."""
    text: str
    severity: Severity
    error: int = 0
    """Id of the error; 0: not said."""


@dataclass(frozen=True, slots=True)
class DcgmReport:
    """What a diagnostic says."""

    passed: int
    """Results."""
    skipped: tuple[str, ...]
    """Names of tests that were left out everywhere."""
    failures: tuple[DcgmFailure, ...]
    version: str = ""


def parsed(text: str, code: int) -> DcgmReport:
    """What a diagnostic printed.

    Args:
        text: Both of its outputs.
        code: Its exit code.

    Raises:
        CannotInspect: it did not test, or says what this release does not understand.
    """
    if code not in TESTED:
        why = NOT_TESTED.get(code, "this release does not know that code")
        raise CannotInspect(f"dcgmi ended with code {code}: {why}; {_said(text)}")
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[begin : end + 1])
        root = next(found[name] for name in ROOTS if name in found)
        if error := root.get("runtime_error"):
            raise CannotInspect(f"DCGM could not test: {error}")
        tests = [test for category in root["test_categories"] for test in category["tests"]]
        results = [(test["name"], result) for test in tests for result in test["results"]]
        failures = [failure for name, one in results for failure in _failures(name, one)]
        statuses: dict[str, set[str]] = {}
        for name, one in results:
            statuses.setdefault(name, set()).add(str(one["status"]).lower())
        version = str(found.get("metadata", {}).get("version", ""))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise CannotInspect(f"dcgmi does not say how the GPUs are: {_said(text)}") from None
    passed = sum(str(one["status"]).lower() == "pass" for _, one in results)
    skipped = tuple(name for name, seen in statuses.items() if seen == {"skip"})
    return DcgmReport(passed, skipped, tuple(failures), version)


def _failures(test: str, result: Mapping[str, Any]) -> Iterator[DcgmFailure]:
    if str(result["status"]).lower() not in {"fail", "warn"}:
        return
    part = f"{result['entity_group']} {result['entity_id']}" if "entity_id" in result else ""
    part = part or (f"GPU {result['gpu_ids']}" if result.get("gpu_ids") else "")
    warnings = result.get("warnings") or ["it failed, and it does not say why"]
    for warning in [warnings] if isinstance(warnings, str | dict) else warnings:
        said = warning if isinstance(warning, dict) else {"warning": str(warning)}
        number = int(said.get("error_severity", Severity.UNKNOWN))
        severity = Severity(number) if number in set(Severity) else Severity.UNKNOWN
        yield DcgmFailure(test, part, str(said.get("warning", "")), severity, int(said.get("error_id", 0)))


def _said(text: str) -> str:
    return " ".join(text.split())[:200] or "it wrote nothing"
