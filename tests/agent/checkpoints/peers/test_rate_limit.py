"""The limit on the rate at which a machine sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.checkpoints.peers.rate_limit import BURST_S, Limiter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_limit_nothing_waits() -> None:
    limiter = Limiter(0.0)
    assert limiter.delay(1 << 40) == 0
    assert limiter.piece(1 << 22) == 1 << 22


@given(
    st.floats(1e4, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(0, 2)), min_size=1, max_size=50),
)
def test_the_rate_is_not_exceeded_in_any_period(rate: float, sends: list[tuple[int, float]]) -> None:
    clock = Clock()
    limiter = Limiter(rate, clock)
    log = []
    for count, pause in sends:
        clock.now += limiter.delay(count)
        log.append((clock.now, count))
        clock.now += pause
    for first in range(len(log)):
        for last in range(first, len(log)):
            total = sum(count for _, count in log[first:last])  # the last piece is not counted, since it has only begun
            assert total <= rate * (log[last][0] - log[first][0] + BURST_S) * 1.001 + 1


def test_a_slow_rate_makes_small_pieces() -> None:
    assert Limiter(1e6).piece(4 << 20) == 250_000
    assert Limiter(1.0).piece(4 << 20) == 4096
