"""The plan of a job follows from sizes and rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.plan import plan_job
from everstep.decisions.sizing.restart import NCCL_S, plan_restart, restore_s
from everstep.decisions.sizing.saves import SCRIPT_S, plan_saves
from everstep.decisions.sizing.traffic import plan_backups, plan_disk, plan_remote
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.hardware import Hardware
from everstep.slots.footprint import footprint

GB = 10**9
NODE = Hardware(shm_gb=1900)


def load(
    state_gb: float = 40,
    hardware: Hardware = NODE,
    step_s: float = 10.0,
    machines: int = 16,
    *,
    hash_threads: int = 1,
    **settings: object,
) -> Load:
    return Load(
        state_bytes=int(state_gb * GB),
        ranks=8,
        machines=machines,
        step_s=step_s,
        policy=CheckpointPolicy.model_validate(settings),
        hardware=hardware,
        hash_threads=hash_threads,
    )


sizes = st.floats(0.01, 200)
slots = st.integers(2, 8)
steps = st.floats(0.05, 100)
loads = st.builds(
    lambda size, count, backups, step_s, threads, gpu, machines: load(
        size,
        NODE if gpu else NODE.model_copy(update={"device_gb_s": 0.0}),
        step_s,
        machines,
        slots=count,
        backup_slots=backups,
        hash_threads=threads,
        disk_every_steps=10,
    ),
    sizes,
    slots,
    slots,
    steps,
    st.integers(1, 32),
    st.booleans(),
    st.integers(1, 100),
)


@given(loads)
def test_a_job_fits_or_the_plan_says_which_slots_do(job: Load) -> None:
    plan = plan_job(job)

    assert plan.memory == footprint(job.state_bytes, 8, job.policy.slots, job.backup_slots)
    assert bool(plan.refusal) == (plan.memory.total > min(NODE.shm_bytes, NODE.memory_bytes))
    if plan.most_slots is None:
        assert footprint(job.state_bytes, 8, 2, 0).total > NODE.memory_bytes
        return
    most, backups = plan.most_slots
    assert footprint(job.state_bytes, 8, most, backups).total <= NODE.memory_bytes
    assert most == 8 or footprint(job.state_bytes, 8, most + 1, backups).total > NODE.memory_bytes


@given(loads)
def test_a_save_that_fits_delays_training_only_by_its_beginning(job: Load) -> None:
    saves = plan_saves(job)

    assert saves.save_s == pytest.approx(saves.script_s + saves.copy_s + saves.checksum_s)
    assert saves.first_s > saves.save_s
    assert saves.first_delay_s >= saves.delay_s >= SCRIPT_S - 1e-9
    assert saves.step_s == pytest.approx(job.step_s + saves.delay_s / saves.every_steps)
    if saves.fits_step:
        assert saves.delay_s == pytest.approx(SCRIPT_S, abs=1e-6)
    if saves.every_steps > 1:
        assert saves.save_s > saves.every_steps / 2 * job.step_s, "half of the distance would be too short"
    assert saves.every_steps * job.step_s >= saves.save_s or saves.every_steps == job.policy.most_distance


def test_without_overlap_training_waits_for_the_complete_save() -> None:
    for alone in (load(overlap=False), load(slots=2)):
        saves = plan_saves(alone)
        assert saves.delay_s == pytest.approx(saves.save_s)
        assert not saves.fits_step


def test_if_every_step_is_saved_a_step_is_at_least_as_long_as_its_save() -> None:
    saves = plan_saves(load(step_s=2.0, save_every_steps=1))

    assert saves.save_s > 2.0
    assert saves.step_s == pytest.approx(saves.save_s)
    assert (saves.fits_step, saves.every_steps) == (False, 1)


def test_a_save_that_is_longer_than_a_step_is_made_every_second_step() -> None:
    saves = plan_saves(load(step_s=2.0))

    assert 2.0 < saves.save_s < 4.0
    assert saves.every_steps == 2
    assert saves.step_s < saves.save_s


def test_the_optimizer_waits_for_a_copy_that_is_longer_than_forward_and_backward() -> None:
    short = replace(load(step_s=4.0), forward_share=0.1)
    saves = plan_saves(short)

    assert saves.copy_s > 0.4
    assert saves.delay_s == pytest.approx(saves.copy_s - 0.4 + SCRIPT_S)
    assert not saves.fits_step


@given(loads, st.integers(2, 8))
def test_more_threads_never_make_a_checksum_slower(job: Load, times: int) -> None:
    more = replace(job, hash_threads=job.hash_threads * times)
    assert plan_saves(more).checksum_s <= plan_saves(job).checksum_s


def test_all_ranks_together_move_no_more_than_memory_does() -> None:
    slow = load(hardware=NODE.model_copy(update={"memory_gb_s": 80.0}), hash_threads=16)

    assert 8 * slow.device_rate <= 80 * GB
    assert 8 * slow.hash_rate <= 80 * GB
    assert 2 * 8 * slow.copy_rate <= 80 * GB


def test_ranks_that_share_a_core_are_slower() -> None:
    few = load(hardware=NODE.model_copy(update={"cores": 4}))
    assert few.hash_rate == pytest.approx(load().hash_rate / 2)


@given(loads, st.integers(1, 32), st.integers(0, 8), st.just(0.0) | st.floats(1e-6, 1))
def test_backups_never_exceed_their_limits(job: Load, connections: int, cards: int, share: float) -> None:
    policy = job.policy.model_copy(update={"transfer_connections": connections, "backup_card_share": share})
    job = replace(job, policy=policy, hardware=job.hardware.model_copy(update={"cards": cards}))
    step_s = plan_saves(job).step_s
    backups = plan_backups(job, step_s)

    if job.machines == 1:
        assert backups is None
        return
    assert backups is not None
    assert backups.bytes == 8 * job.state_bytes
    assert backups.rate <= 1e9 * NODE.connection_gb_s * connections * max(1, cards)
    assert backups.rate <= (cards * 50e9 if cards else 1.25e9) * (share or 1)
    assert backups.every_steps * step_s >= backups.seconds * (1 - 1e-9)
    assert 0 < backups.card_share <= 1 + 1e-9


def test_what_limits_backups_is_named() -> None:
    def bound_by(**settings: object) -> str:
        backups = plan_backups(load(**settings), 10.0)  # type: ignore[arg-type]
        assert backups is not None
        return backups.bound_by

    no_cards = NODE.model_copy(update={"cards": 0})
    assert bound_by() == "transfer_connections"
    assert bound_by(transfer_connections=32) == "backup_card_share"
    assert bound_by(transfer_connections=32, backup_card_share=0) == "the cards"
    assert bound_by(hardware=no_cards, backup_card_share=0) == "the card for management"
    assert bound_by(backup_rate_mb_s=100) == "backup_rate_mb_s"


def test_there_are_no_backups_without_a_network() -> None:
    alone = load(hardware=NODE.model_copy(update={"cards": 0, "management_gbit_s": 0.0}))
    backups = plan_backups(alone, 10.0)

    assert backups is not None
    assert (backups.rate, backups.every_steps, backups.per_second) == (0, 0, 0)


def test_backups_that_are_turned_off_need_no_memory_and_no_network() -> None:
    plan = plan_job(load(backup=False))

    assert (plan.memory.backups, plan.backups) == (0, None)
    assert "read copies" in [part.name for part in plan.replacement]


def test_disks_get_the_steps_that_are_due_first() -> None:
    by_time, by_step = plan_disk(load(), 10.0), plan_disk(load(disk_every_steps=6), 10.0)

    assert by_time is not None
    assert by_step is not None
    assert (by_time.every_s, by_time.fits) == (900, True)
    assert (by_step.every_s, by_step.fits) == (60, False)
    assert by_time.space == 3 * 320 * GB
    assert plan_disk(load(disk=False), 10.0) is None
    assert plan_disk(load(disk_every_min=0), 10.0) is None


def test_remote_storage_has_the_copies_of_all_machines() -> None:
    remote = plan_remote(load(remote_url="s3://bucket/runs"), 10.0)

    assert remote is not None
    assert remote.space == 16 * 3 * 320 * GB
    assert plan_remote(load(), 10.0) is None


@given(loads)
def test_a_restart_is_the_sum_of_its_parts_and_grows_with_the_state(job: Load) -> None:
    parts = plan_restart(job)
    larger = plan_restart(replace(job, state_bytes=2 * job.state_bytes))

    assert all(part.seconds >= 0 for part in parts)
    assert [part.name for part in parts] == [part.name for part in larger]
    assert all(more.seconds >= part.seconds for part, more in zip(parts, larger, strict=True))
    assert (NCCL_S in [part.seconds for part in parts]) == job.on_gpu


def test_a_lost_machine_costs_the_copies_too() -> None:
    plan = plan_job(load())

    assert sum(part.seconds for part in plan.replacement) > sum(part.seconds for part in plan.restart)
    assert plan.backups is not None
    assert plan.backups.seconds in [part.seconds for part in plan.replacement]
    assert plan_job(load(machines=1)).replacement == []


@given(sizes)
def test_a_restore_to_memory_takes_two_threads_between_half_and_all_of_the_work(size: float) -> None:
    two = load(size, NODE.model_copy(update={"device_gb_s": 0.0, "cores": 16}))
    one = load(size, NODE.model_copy(update={"device_gb_s": 0.0, "cores": 8}))

    assert restore_s(one) / 2 * (1 - 1e-9) <= restore_s(two) <= restore_s(one)
    assert restore_s(two) >= two.state_bytes / 1e9 / NODE.cached_hash_gb_s
