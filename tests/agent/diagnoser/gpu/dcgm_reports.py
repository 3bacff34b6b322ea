"""Makes the output of ``dcgmi diag -j``, after DCGM's own schema."""

from __future__ import annotations

import json
from typing import Any


def report(*results: dict[str, Any], name: str = "memory", root: str = "DCGM Diagnostic") -> str:
    """Return a report as DCGM 4 prints it, with the lines that come before and after the JSON."""
    test = {"name": name, "results": list(results), "test_summary": {"status": "Pass"}}
    body = {root: {"test_categories": [{"category": "Hardware", "tests": [test]}]}, "metadata": {"version": "4.6.0"}}
    return f"Warning: something\n{json.dumps(body)}\nSuccessfully ran diagnostic for group.\n"


def gpu(number: int, status: str, *warnings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": number, "status": status}
    return found | ({"warnings": list(warnings)} if warnings else {})


def warning(severity: int, error: int = 52) -> dict[str, Any]:
    return {"warning": "it is so", "error_id": error, "error_category": 10, "error_severity": severity}
