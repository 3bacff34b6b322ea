"""The limits of recovery."""

from __future__ import annotations

from pathlib import Path

from everstep.model.recovery_policy import RecoveryPolicy

DOCS = Path(__file__).parents[3] / "docs"


def test_every_limit_is_in_the_docs_with_its_default() -> None:
    text = (DOCS / "operations.md").read_text()

    for name, field in RecoveryPolicy.model_fields.items():
        assert f"| `{name}` | {field.default:g} | {field.description} |" in text
