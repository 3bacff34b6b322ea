"""What looks like a secret, and is not shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.job import JobSpec
from everstep.redaction import HIDDEN, is_secret, redacted


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "hf_abc", True),
        ("aws_secret_access_key", "abc", True),
        ("WANDB_API_KEY", "abc", True),
        ("DB_PASSWORD", "12", True),
        ("OMP_NUM_THREADS", "4", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MASTER_ADDR", "10.0.0.1", False),
    ],
)
def test_names_of_secrets(name: str, value: str, *, secret: bool) -> None:
    assert is_secret(name, value) is secret


@given(st.dictionaries(st.text(min_size=1), st.text()), st.sampled_from(["TOKEN", "Secret", "key", "PassWord"]))
def test_no_value_of_a_secret_is_left_and_nothing_else_changes(env: dict[str, str], word: str) -> None:
    hidden = {f"{name}_{word}": f"value of {name}" for name in env}
    shown = redacted(env | hidden)
    assert shown.keys() == (env | hidden).keys()
    assert all(shown[name] == HIDDEN for name in hidden)
    assert all(shown[name] in {value, HIDDEN} for name, value in env.items() if name not in hidden)


def test_patterns_are_the_jobs_own() -> None:
    spec = JobSpec(name="gpt", script="/gpt.py", env={"LICENCE": "1-2-3", "HF_TOKEN": "hf_abc"}, redact=["LICEN[CS]E"])
    assert spec.shown().env == {"LICENCE": HIDDEN, "HF_TOKEN": "hf_abc"}
    assert spec.env["LICENCE"] == "1-2-3"
