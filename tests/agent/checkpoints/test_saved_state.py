"""What an agent knows of a rank's copies."""

from __future__ import annotations

from agent.checkpoints.saved_state import SavedStates


def test_a_later_step_counts_though_the_clock_was_set_back() -> None:
    saved = SavedStates()
    saved.own(0, 7, 1_000)
    saved.own(0, 8, 500)
    assert (saved.of(0).own_step, saved.of(0).own_ns) == (8, 500)


def test_what_was_committed_before_does_not_count() -> None:
    """A save signal of an earlier commit may arrive later."""
    saved = SavedStates()
    saved.own(0, 8, 1_000)
    saved.own(0, 7, 900)
    assert saved.of(0).own_step == 8
    saved.own(0, 7, 1_100)
    assert saved.of(0).own_step == 7, "the job was rolled back, so a later save of an earlier step counts"
