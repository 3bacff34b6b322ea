"""How long a job may stand still: by what is seen of its ranks, and by what it did before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.hang.progress import HangCheck, HangSign
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.decisions.detect.hang import apart_s, bound_s, find_hang, first_sample_s, hang_seen_s, hang_unseen_s
from everstep.decisions.detect.job_facts import JobFacts
from everstep.model.hang import HangConclusion, HangMethod
from everstep.model.recovery_policy import RecoveryPolicy
from tests.everstep.decisions.detect.job_facts import facts

DEFAULTS = RecoveryPolicy()
CULPRIT = HangVerdict(HangConclusion.NAMES, HangMethod.WAIT_FOR, "rank 1 on m1: 7 ranks wait for it", (1,), (1,))


def stands(stillness: HangSign | None, *, typical_s: float = 0.1, longest_s: float = 0.3, **more: Any) -> JobFacts:
    """A job that stands still, of which looks at its ranks show this; None: nobody looked."""
    standing = None if stillness is None else HangCheck(stillness, CULPRIT)
    fields: dict[str, Any] = {"typical_step_s": typical_s, "longest_step_s": longest_s, "hang_check": standing}
    return facts(policy=DEFAULTS, **fields, **more)


@pytest.mark.parametrize(
    ("stillness", "typical_s", "longest_s", "expected_s"),
    [
        (None, 0.1, 0.3, 600.0),
        (HangSign.UNKNOWN, 0.1, 0.3, 600.0),
        (HangSign.BUSY, 0.1, 0.3, 600.0),
        (HangSign.QUIET, 0.1, 0.3, 3.0),
        (HangSign.QUIET, 20.0, 25.0, 200.0),
        (HangSign.QUIET, 0.1, 60.0, 90.0),  # a pause like one that came to its end before
        (HangSign.NEVER, 20.0, 25.0, 0.5),
        (HangSign.NEVER, 0.0, 0.0, 0.5),
        (HangSign.QUIET, 0.0, 0.0, 600.0),  # no step was seen to take its time: it may be a usual pause
        (HangSign.QUIET, 0.0, 0.4, 600.0),
        (HangSign.COMPUTES, 0.1, 0.3, 3600.0),
        (HangSign.BUSY, 0.1, 500.0, 750.0),  # learnt: its evaluations take so long
        (HangSign.BUSY, 0.1, 5000.0, 3600.0),
        (HangSign.BUSY, 900.0, 900.0, 9000.0),
    ],
)
def test_the_bound_is_by_what_is_seen(
    stillness: HangSign | None, typical_s: float, longest_s: float, expected_s: float
) -> None:
    assert bound_s(stands(stillness, typical_s=typical_s, longest_s=longest_s)) == expected_s


def test_a_hang_is_told_with_its_culprit() -> None:
    assert find_hang(stands(HangSign.QUIET, quiet_s=2.9)) is None
    found = find_hang(stands(HangSign.QUIET, quiet_s=3.1, machine_names=["m0", "m1"], last_step=7))
    assert found is not None
    assert (found.ranks, found.machines) == ([1], ["m1"])
    assert found.headline == "no rank completed a step for 3 s, after step 7: rank 1 on m1: 7 ranks wait for it"


@pytest.mark.parametrize("stillness", [HangSign.BUSY, HangSign.COMPUTES, HangSign.UNKNOWN, None])
def test_an_evaluation_of_minutes_raises_nothing(stillness: HangSign | None) -> None:
    assert find_hang(stands(stillness, quiet_s=590.0)) is None


def test_looks_come_early_enough_and_not_before() -> None:
    quick, slow = stands(None), stands(None, typical_s=20.0)
    assert (first_sample_s(quick), first_sample_s(slow)) == (1.5, 189.5)
    assert first_sample_s(stands(None, typical_s=0.0, longest_s=0.0)) == 1.5, "looks may show that nothing will come"
    assert first_sample_s(facts(policy=RecoveryPolicy(hang={"trace_s": 0}))) is None


TIMES = st.floats(0.0, 10_000.0)


@given(TIMES, TIMES, st.sampled_from([None, *HangSign]))
def test_whoever_looks_closely_is_never_surer_of_a_hang_for_it_than_the_floor(
    typical_s: float, longest_s: float, stillness: HangSign | None
) -> None:
    found = stands(stillness, typical_s=typical_s, longest_s=longest_s)
    assert hang_seen_s(found) <= hang_unseen_s(found)
    assert hang_unseen_s(found) >= DEFAULTS.hang.floor_s
    if stillness is HangSign.QUIET:
        assert bound_s(found) >= DEFAULTS.hang.idle_floor_s
        assert bound_s(found) > longest_s or bound_s(found) == hang_unseen_s(found)
    elif stillness is not HangSign.NEVER:
        assert bound_s(found) >= DEFAULTS.hang.floor_s
    assert 1.0 <= apart_s(typical_s) <= 10.0
