"""The output of ``dcgmi diag -j`` is read correctly: severities decide, and untested parts are unknown."""

from __future__ import annotations

import pytest

from agent.diagnoser.gpu.report import NOT_TESTED, Severity, parsed
from everstep.errors import CannotInspect
from tests.agent.diagnoser.gpu.dcgm_reports import gpu, report, warning


def test_gpus_that_pass() -> None:
    found = parsed(report(gpu(0, "Pass"), gpu(1, "Pass")), 0)
    assert (found.passed, found.skipped, found.failures, found.version) == (2, (), (), "4.6.0")


@pytest.mark.parametrize("severity", list(Severity))
@pytest.mark.parametrize("code", [0, 205])
def test_a_failure_has_its_severity_for_a_warning_is_printed_as_one_too(severity: Severity, code: int) -> None:
    """DCGM prints a warning as a failure, too. Only the severity distinguishes them."""
    [failure] = parsed(report(gpu(0, "Pass"), gpu(3, "Fail", warning(severity))), code).failures
    assert (failure.part, failure.severity, failure.error) == ("GPU 3", severity, 52)


def test_what_an_older_dcgm_prints_has_no_severity() -> None:
    text = report({"gpu_ids": "0,1", "status": "Fail", "warnings": "it is so"}, root="DCGM GPU Diagnostic")
    [failure] = parsed(text, 205).failures
    assert (failure.part, failure.text, failure.severity) == ("GPU 0,1", "it is so", Severity.UNKNOWN)


def test_a_severity_that_this_release_does_not_know_is_unknown() -> None:
    assert parsed(report(gpu(0, "Fail", warning(17))), 0).failures[0].severity is Severity.UNKNOWN


def test_tests_that_were_skipped_are_named() -> None:
    assert parsed(report(gpu(0, "Skip"), gpu(1, "Skip"), name="eud"), 0).skipped == ("eud",)


@pytest.mark.parametrize("code", [*NOT_TESTED, 1, 77])
def test_exit_codes_that_say_that_nothing_was_tested(code: int) -> None:
    with pytest.raises(CannotInspect, match=f"ended with code {code}: {NOT_TESTED.get(code, 'the code is')[:9]}"):
        parsed(report(gpu(0, "Fail", warning(2))), code)


@pytest.mark.parametrize("text", ["", "no JSON", '{"body": {}}', '{"DCGM Diagnostic": {"test_categories": [{}]}}'])
def test_what_is_not_understood_is_unknown(text: str) -> None:
    with pytest.raises(CannotInspect, match="does not report the health of the GPUs"):
        parsed(text, 0)


def test_an_error_of_dcgm_itself_is_no_fault_of_a_gpu() -> None:
    with pytest.raises(CannotInspect, match="could not test: no hostengine"):
        parsed('{"DCGM Diagnostic": {"runtime_error": "no hostengine"}}', 0)
