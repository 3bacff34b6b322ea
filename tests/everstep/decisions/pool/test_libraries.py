"""Which libraries a machine has otherwise than the others of a job."""

from __future__ import annotations

import pytest

from everstep.decisions.pool.libraries import differing

HERE = {"python": "3.11.9", "torch": "2.9.1"}


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [
        ([HERE], ""),
        ([], ""),
        ([{}], ""),
        ([{"numpy": "2.3.0"}], ""),
        ([{"torch": "2.8.0"}, HERE], ""),
        ([HERE | {"torch": "2.8.0"}], "torch 2.9.1 instead of 2.8.0"),
        (
            [{"torch": "2.8.0", "python": "3.12.1"}, {"torch": "2.7.1"}],
            "python 3.11.9 instead of 3.12.1, torch 2.9.1 instead of 2.7.1 or 2.8.0",
        ),
    ],
)
def test_what_all_others_have_otherwise_is_named(elsewhere: list[dict[str, str]], said: str) -> None:
    assert differing(HERE, elsewhere) == said
