"""The answers of the rules of eviction that an incident keeps."""

from __future__ import annotations

from everstep.model.eviction import ANSWERS_KEPT, EvictAnswer, EvictionState, EvictMode


def answer(machine: str, *, yes: bool, why: str = "") -> EvictAnswer:
    return EvictAnswer(rule="gone-machine", machine=machine, yes=yes, why=why, mode=EvictMode.ACT, reason="silent")


def test_the_newest_answer_about_a_machine_is_kept() -> None:
    state = EvictionState()
    state.record([answer(f"m{number}", yes=False) for number in range(ANSWERS_KEPT)])

    state.record([answer("m0", yes=True, why="it is gone"), answer("new", yes=False)])

    assert state.wanted == ["m0"]
    assert len(state.asked) == ANSWERS_KEPT
    assert [kept.machine for kept in state.asked[-2:]] == ["m0", "new"]
