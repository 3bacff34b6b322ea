"""The limits of recovery."""

from __future__ import annotations

from pathlib import Path

from everstep.model.eviction import EvictMode
from everstep.model.recovery_policy import RecoveryPolicy

DOCS = Path(__file__).parents[3] / "docs"


def test_every_limit_is_in_the_docs_with_its_default() -> None:
    text = (DOCS / "guides" / "operations.md").read_text()

    for name, field in RecoveryPolicy.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = str(default) if isinstance(default, EvictMode) else f"{default:g}" if default else "0"
        shown = {"{}": "none", "[]": "none", "False": "no"}.get(str(default), shown)
        assert f"| `{name}` | {shown} | {field.description} |" in text


def test_a_mode_that_this_release_does_not_know_is_read_and_kept() -> None:
    stored = '{"evict_mode": "later", "evict_rules": {"later-rule": "later"}}'

    policy = RecoveryPolicy.model_validate_json(stored)

    assert policy.model_dump(include={"evict_mode", "evict_rules"}) == {
        "evict_mode": "later",
        "evict_rules": {"later-rule": "later"},
    }
