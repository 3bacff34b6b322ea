"""Times from a machine whose clock is wrong are corrected."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.clocks import SLACK_S, shift_ns, stream_shift_ns

S = 10**9
NOW = 1000 * S
OFF = st.integers(-(10**6), 10**6)


@given(took_ms=st.integers(0, 60_000), way_ms=st.integers(0, 900), off_ms=st.integers(-90, 90))
def test_a_clock_that_may_be_right_is_not_corrected(took_ms: int, way_ms: int, off_ms: int) -> None:
    sent = NOW + took_ms * 10**6
    assert shift_ns(sent + off_ms * 10**6, asked_ns=NOW, heard_ns=sent + way_ms * 10**6) == 0
    assert stream_shift_ns(sent + off_ms * 10**6, sent + way_ms * 10**6) == 0
    assert shift_ns(0, asked_ns=NOW, heard_ns=NOW) == 0, "the agent did not send its time, so nothing is corrected"


@given(off_s=OFF, took_ms=st.integers(0, 60_000), way_ms=st.integers(0, 900))
def test_a_corrected_time_is_wrong_by_the_time_of_the_answers_way(off_s: int, took_ms: int, way_ms: int) -> None:
    sent = NOW + took_ms * 10**6
    heard = sent + way_ms * 10**6
    shift = shift_ns(sent + off_s * S, asked_ns=NOW, heard_ns=heard)
    assert shift == heard - sent - off_s * S or (shift == 0 and -took_ms - 1000 <= off_s * 1000 <= way_ms + 1000)
    assert abs(stream_shift_ns(sent + off_s * S, heard) + off_s * S) <= (10 + SLACK_S) * S
