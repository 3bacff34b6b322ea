"""From which step a job goes on."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.restore import NOTHING_HELD, choose_restore
from everstep.incident import Held


def held(rank: int, step: int, valid: bool = True) -> Held:
    return Held(rank=rank, machine=f"m{rank}", completed_steps=step, valid=valid, reason="" if valid else "checksum")


def test_the_latest_step_that_all_hold_is_taken() -> None:
    choice = choose_restore([held(0, 20), held(0, 21), held(1, 20), held(1, 19)], world_size=2)

    assert choice.step == 20


def test_a_damaged_copy_does_not_count_and_is_named() -> None:
    choice = choose_restore([held(0, 20), held(0, 19), held(1, 20, valid=False), held(1, 19)], world_size=2)

    assert choice.step == 19
    assert "rank 1 on m1: checksum" in choice.reason


def test_without_any_checkpoint_the_script_decides() -> None:
    assert choose_restore([], world_size=2).step == NOTHING_HELD


def test_checkpoints_that_are_gone_are_a_loss_and_not_a_script_that_has_none() -> None:
    choice = choose_restore([], world_size=2, held_before=True)

    assert (choice.step, choice.reason) == (0, "the checkpoints that the job had are gone")


def test_without_a_common_step_the_job_begins_again_and_says_who_lacks_it() -> None:
    choice = choose_restore([held(0, 7)], world_size=3)

    assert choice.step == 0
    assert "step 7 lacks rank 1, 2" in choice.reason


@given(
    st.integers(1, 5).flatmap(
        lambda world: st.tuples(
            st.just(world),
            st.lists(st.tuples(st.integers(0, world - 1), st.integers(0, 9), st.booleans()), max_size=40),
        )
    )
)
def test_what_is_chosen_is_held_valid_by_all_and_nothing_later_is(
    case: tuple[int, list[tuple[int, int, bool]]],
) -> None:
    world, copies = case
    choice = choose_restore([held(*copy) for copy in copies], world)
    valid = {(rank, step) for rank, step, ok in copies if ok}

    def common(step: int) -> bool:
        return all((rank, step) in valid for rank in range(world))

    if choice.step > 0:
        assert common(choice.step)
    assert not any(common(step) for step in range(max(choice.step, 0) + 1, 10))
    assert (choice.step == NOTHING_HELD) == (not copies)
