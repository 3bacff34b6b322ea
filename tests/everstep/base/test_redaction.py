"""Variables and texts that look like secrets are hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.base.redaction import HIDDEN, is_secret, masked, redacted
from everstep.model.job import JobSpec


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
    assert spec.without_secrets().env == {"LICENCE": HIDDEN, "HF_TOKEN": "hf_abc"}
    assert spec.env["LICENCE"] == "1-2-3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pw@db/x", "postgresql://me:(hidden)@db/x"),
        ("s3://:k3y@host", "s3://:(hidden)@host"),
        ("PASSWORD=hunter2 host=db", "PASSWORD=(hidden) host=db"),
        ("{'api_key': 'abc', 'n': 1}", "{'api_key': '(hidden)', 'n': 1}"),
        ('{"HF_TOKEN": "hf_x"}', '{"HF_TOKEN": "(hidden)"}'),
        ("authorization: Bearer abcdefgh.ijk", "authorization: Bearer (hidden)"),
        ("http://127.0.0.1:8233/a:b@c", "http://127.0.0.1:8233/a:b@c"),
        ("tokens: 4096, token_rate=3", "tokens: 4096, token_rate=3"),
        ("step 20, loss 2.5, 12.3k token/s", "step 20, loss 2.5, 12.3k token/s"),
        ("ipv4:127.0.0.12:21251: refused", "ipv4:127.0.0.12:21251: refused"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown
