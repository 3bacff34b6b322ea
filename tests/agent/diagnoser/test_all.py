"""The list of diagnostic tests, and their settings."""

from __future__ import annotations

import json

import pytest

from agent.diagnoser.all import TESTS, kind_named, limits_named
from agent.diagnoser.diagnostic import COMMON
from everstep.decisions.blame.diagnose.choose_tests import ROWS
from everstep.decisions.blame.diagnose.compare import BREAKS, NOT_BEGUN
from everstep.errors import ConfigError
from everstep.model.diagnosis import BETWEEN_MACHINES, Diagnostic
from everstep.model.finding import Health
from everstep.model.recovery_policy import RecoveryPolicy


def test_there_is_one_test_for_each_name() -> None:
    assert {kind.name for kind in TESTS} == set(Diagnostic)
    assert len(TESTS) == len(set(Diagnostic))
    assert {kind.name for kind in TESTS if kind.is_between()} == set(BETWEEN_MACHINES)


def test_the_policys_time_suffices_for_all_tests_of_a_machine() -> None:
    """Otherwise the first tests could use the time of the others, and those would never run."""
    needed = max(
        sum(kind_named(test).limits_type().deadline_s for test in row.choice.tests if test not in BETWEEN_MACHINES)
        for row in ROWS
    )
    assert needed <= RecoveryPolicy().diagnose.timeout_s


def test_each_reason_of_a_broken_test_is_declared() -> None:
    known = {reason.code: reason for kind in TESTS for reason in (*kind.reasons, *COMMON)}
    assert known.keys() >= {*BREAKS, NOT_BEGUN}
    assert {known[code].verdict for code in BREAKS} == {Health.UNKNOWN}


def test_each_reason_code_has_one_meaning() -> None:
    codes: dict[str, object] = {}
    for reason in [reason for kind in TESTS for reason in (*kind.reasons, *COMMON)]:
        assert codes.setdefault(reason.code, reason) == reason


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("teleport", {}, "there is no test 'teleport'; there are eud, dcgm"),
        ("memory", {"gb": 1}, "the test memory has no setting 'gb'; there are deadline_s, mb"),
        ("memory", {"mb": -1}, "the test memory: mb is -1"),
        ("bitwise", {"moe": True, "ep": 2}, "leave tp at 1"),
        ("bitwise", {"tp": 3}, "heads must be a multiple of tp"),
        ("bitwise", {"dtype": "float64"}, "dtype must be one of float32"),
    ],
)
def test_an_unknown_test_or_setting_is_refused(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        limits_named(name, json.dumps(settings))


def test_settings_that_are_not_json_are_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        limits_named("memory", "{")
    assert limits_named("memory", "") == kind_named("memory").limits_type()
