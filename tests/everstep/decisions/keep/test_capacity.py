"""A job that does not fit into the machines' memory is refused, with the numbers."""

from __future__ import annotations

from everstep.decisions.keep.capacity import Room, lack_of_room
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

GB = 10**9


def spec(**checkpoint: object) -> JobSpec:
    asked = {"state_mb_per_rank": 1000.0, "slots": 3, "backup_slots": 2} | checkpoint
    return JobSpec.model_validate(
        {"name": "job", "script": "/job.py", "machines": 4, "ranks_per_machine": 2, "checkpoint": asked}
    )


def machines(host: str = "10.0.0.{}") -> list[Machine]:
    return [Machine(name=f"m{index}", address=f"{host.format(index + 1)}:1") for index in range(4)]


def rooms(*shm: float) -> dict[str, Room]:
    return {f"m{index}": Room(int(free * GB), 1000 * GB) for index, free in enumerate(shm)}


def test_a_job_that_fits_or_states_no_size_may_start() -> None:
    assert lack_of_room(spec(), machines(), rooms(11, 11, 11, 11)) == ""
    assert lack_of_room(spec(state_mb_per_rank=0.0), machines(), rooms(0, 0, 0, 0)) == ""


def test_the_machine_that_lacks_room_is_named_with_what_it_needs_and_has() -> None:
    found = lack_of_room(spec(), machines(), rooms(11, 11, 9, 11))

    assert "machine m2" in found
    assert "2 ranks with 1.00 GB" in found
    assert "9.00 GB" in found
    assert "m1" not in found


def test_without_backups_less_is_needed() -> None:
    assert lack_of_room(spec(backup=False), machines(), rooms(7, 7, 7, 7)) == ""


def test_machines_on_one_host_share_its_memory() -> None:
    local = machines("127.0.0.1{}")

    assert "this host, on which 4 machines of the job are" in lack_of_room(spec(), local, rooms(11, 11, 11, 11))
    assert lack_of_room(spec(), local, rooms(41, 41, 41, 41)) == ""


def test_a_machine_that_did_not_answer_is_not_judged() -> None:
    assert lack_of_room(spec(), machines(), {}) == ""
    assert "m3" in lack_of_room(spec(), machines(), {"m3": Room(0, 0)})
