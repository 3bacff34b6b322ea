"""The remote tier: copies are made from the disk, survive failures, and restore machines that lost their state."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.checkpoints.tiers import remote_copier
from agent.checkpoints.tiers.remote_copier import retry_after
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from everstep.errors import AgentUnreachable, ConfigError, CorruptCheckpoint
from everstep.slots.format import SlotHeader
from everstep.slots.reader import SlotReader
from tests.agent.checkpoints.tiers.tier_job import JOB, REMOTE, RUNS, Machine, contents, wait_for


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def pair(tmp_path: Path, url: str) -> Iterator[list[Machine]]:
    made = [
        Machine(tmp_path, name=name, ranks=ranks, world=4, remote_url=url, shared=30_000)
        for name, ranks in {"m1": (0, 1), "m2": (2, 3)}.items()
    ]
    yield made
    for machine in made:
        machine.close()


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Iterator[Machine]:
    made = Machine(tmp_path, remote_url=url)
    yield made
    made.close()


def both(machines: list[Machine], step: int) -> None:
    for machine in machines:
        machine.save(step)
    for machine in machines:
        machine.on_remote(step)


def test_what_is_whole_on_disk_follows_to_remote_and_the_last_are_kept(pair: list[Machine], url: str) -> None:
    for machine in pair:
        machine.launch()
    for step in (10, 20, 30, 40):
        both(pair, step)
    folder = RemoteFolder(url, JOB)

    def steps() -> set[str]:
        return {name.partition("/")[0] for name in folder.sizes()}

    # The machine of rank 0 deletes old steps after its own copy. The other machine's last step may be incomplete then.
    wait_for(lambda: steps() <= {"step-000000020", "step-000000030", "step-000000040"}, "old steps are deleted")
    assert {"step-000000030", "step-000000040"} <= steps()
    remote_ones = [one for one in pair[1].held(remote_url=url, verify=True) if one.tier == REMOTE]
    assert {one.rank for one in remote_ones if one.completed_steps == 40 and one.valid} == {0, 1, 2, 3}
    assert all(one.place.startswith(f"{url}/{JOB}/step-") for one in remote_ones)
    assert not [one for one in pair[1].held() if one.tier == REMOTE], (
        "remote storage is listed only if the request names it"
    )


def test_a_machine_that_lost_memory_and_disk_restores_from_remote(pair: list[Machine]) -> None:
    for machine in pair:
        machine.launch()
    both(pair, 10)
    for machine in pair:
        machine.lose_memory()
        shutil.rmtree(machine.place.state_dir)
        for rank in machine.ranks_here:
            assert machine.restore(rank, 10, REMOTE) > machine.size
            assert machine.holds(rank, 10)


class Fetching(Machine):
    """A machine that gets tensors from the slots of another machine in this process."""

    source: Machine
    asked: list[tuple[str, int, int]]

    def fetched(self, address: str, job: str, rank: int, step: int, view: memoryview) -> SlotHeader:
        self.asked.append((address, rank, len(view)))
        if address == "nobody":
            raise AgentUnreachable(f"{address} does not answer")
        reader = SlotReader(self.source.shm / f"checkpoint-{rank}")
        header = reader.header(step)
        assert header
        assert reader.read_into(header, 0, view) == len(view)
        reader.close()
        return header


def test_equal_tensors_come_from_the_rank_that_read_them(
    pair: list[Machine], tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in pair:
        machine.launch()
    both(pair, 10)
    digests = {one.rank: one.digest for one in pair[0].held(remote_url=url) if one.tier == REMOTE}
    assert len(set(digests.values())) == 1, (
        "weights are equal on all ranks, and the 10 kB that differ are too small to count"
    )
    taken: list[tuple[int, int]] = []
    ranges = RemoteFolder.ranges

    def counted(self: RemoteFolder, name: str, wanted: list[tuple[int, int]]) -> list[bytes]:
        taken.extend(wanted)
        return ranges(self, name, wanted)

    monkeypatch.setattr(RemoteFolder, "ranges", counted)
    monkeypatch.setattr(RemoteFolder, "reading", None)
    fresh = Fetching(tmp_path, name="m3", ranks=(3,), world=4, remote_url=url, shared=30_000)
    fresh.source, fresh.asked = pair[0], []
    try:
        fresh.restore(3, 10, REMOTE, tensors_rank=1, tensors_address="m1:7070")
        assert fresh.holds(3, 10)
        assert fresh.asked == [("m1:7070", 1, 40_000)]
        assert 10_000 <= sum(end - begin for begin, end in taken) < 15_000
        with pytest.raises(AgentUnreachable):
            fresh.restore(2, 10, REMOTE, tensors_rank=1, tensors_address="nobody")
        assert not fresh.holds(2, 10)
    finally:
        fresh.close()


def test_another_ranks_tensors_that_are_not_alike_are_refused(pair: list[Machine], tmp_path: Path, url: str) -> None:
    for machine in pair:
        machine.launch()
    both(pair, 10)
    pair[0].ranks[1].save(11)
    fresh = Fetching(tmp_path, name="m3", ranks=(3,), world=4, remote_url=url, shared=30_000)
    fresh.source, fresh.asked = pair[0], []
    path = pair[0].shm / "checkpoint-1"
    data = bytearray(path.read_bytes())
    data[data.find(contents(1, 10, 40_000, shared=30_000)[:64])] ^= 1
    path.write_bytes(data)
    try:
        with pytest.raises(CorruptCheckpoint, match="from another rank does not match the manifest"):
            fresh.restore(3, 10, REMOTE, tensors_rank=1, tensors_address="m1:7070")
        assert not fresh.holds(3, 10)
        fresh.restore(3, 10, REMOTE)
        assert fresh.holds(3, 10)
    finally:
        fresh.close()


def test_a_failure_is_said_and_tried_again(
    machine: Machine, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_copier, "FIRST_RETRY_S", 0.05)
    (tmp_path / "remote").write_text("not a folder")
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    wait_for(lambda: f"remote storage {url} fails: " in machine.problem(), "the failure is reported")
    assert machine.saved.of(0).remote_step == -1
    (tmp_path / "remote").unlink()
    machine.on_remote(10)
    wait_for(lambda: machine.problem() == "", "the problem is over")


def test_a_driver_that_is_missing_is_named(machine: Machine, tmp_path: Path) -> None:
    machine.options.remote_url = "s3://runs"
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    wait_for(
        lambda: "needs a driver that is not installed where it is used" in machine.problem(),
        "the missing driver is reported",
    )
    found = [one for one in machine.held(remote_url="s3://runs") if one.tier == REMOTE]
    assert [(one.valid, one.completed_steps) for one in found] == [(False, -1)]
    assert re.search("s3://runs cannot be listed: .*Install s3fs", found[0].reason)
    assert machine.steps(remote_url="s3://runs") == {0: [10], 1: [10]}, (
        "copies on disk are listed in spite of the missing driver"
    )
    with pytest.raises(ConfigError, match="Install s3fs"):
        machine.restore(0, 10, REMOTE)


def test_attempts_become_rarer() -> None:
    waits = [retry_after(failures) for failures in range(1, 40)]
    assert waits == sorted(waits)
    assert (waits[0], waits[1], waits[-1]) == (2.0, 4.0, 300.0)


@pytest.mark.parametrize(
    ("damage", "listed", "said"),
    [
        ("cut", False, r"has \d+ of \d+ bytes"),
        ("flip", True, "do not match their checksum"),
        ("manifest", False, "has no manifest"),
        ("gone", False, "is gone"),
    ],
)
def test_damage_there_is_named_and_never_restored(
    machine: Machine, tmp_path: Path, url: str, damage: str, listed: bool, said: str
) -> None:
    machine.launch()
    machine.save(10)
    machine.on_remote(10)
    machine.lose_memory()
    folder = tmp_path / "remote" / JOB / "step-000000010"
    data = folder / "rank-1.safetensors"
    match damage:
        case "cut":
            data.write_bytes(data.read_bytes()[:-1000])
        case "flip":
            whole = bytearray(data.read_bytes())
            whole[len(whole) // 2] ^= 1
            data.write_bytes(whole)
        case "manifest":
            (folder / "rank-1.json").unlink()
        case "gone":
            data.unlink()
    for verify, valid in ((False, listed), (True, False)):
        found = {one.rank: one for one in machine.held(remote_url=url, verify=verify) if one.tier == REMOTE}
        assert found[0].valid
        assert found[1].valid == valid
    assert re.search(said, found[1].reason)
    with pytest.raises(CorruptCheckpoint):
        machine.restore(1, 10, REMOTE)
    machine.restore(0, 10, REMOTE)
    assert machine.holds(0, 10)


def test_later_steps_there_are_set_aside_and_copied_anew(machine: Machine, tmp_path: Path, url: str) -> None:
    machine.launch()
    for step in (10, 20):
        machine.save(step)
        machine.on_remote(step)
    machine.tiers.shut()
    machine.launch(generation=2, resume_step=10)
    folder = tmp_path / "remote" / JOB / "step-000000020"
    wait_for(
        lambda: not (folder / "rank-0.json").exists() and not (folder / "rank-1.json").exists(),
        "the later steps are set aside",
    )
    wait_for(lambda: machine.saved.of(0).remote_step == 10, "the later steps are not counted any more")
    assert {one.completed_steps for one in machine.held(remote_url=url) if one.tier == REMOTE} == {10}
    machine.save(20)
    machine.on_remote(20)
    found = {
        (one.completed_steps, one.generation)
        for one in machine.held(remote_url=url, verify=True)
        if one.tier == REMOTE and one.valid
    }
    assert found == {(10, 1), (20, 2)}


def test_an_earlier_run_of_the_name_is_not_listed_even_before_it_is_set_aside(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.launch()
    machine.save(10)
    machine.on_remote(10)
    machine.tiers.close()
    jobs = machine.place.state_dir / "jobs" / JOB
    jobs.rename(jobs.with_name("gpt.previous"))
    monkeypatch.setattr(remote_copier._RemoteRound, "run", lambda self: None)
    machine.tiers = machine.made()
    assert {one.completed_steps for one in machine.held(remote_url=url)} == {10}
    machine.turn_to(RUNS[1])
    machine.launch()
    assert machine.held(remote_url=url) == []


def test_a_copy_under_way_is_given_up_when_the_job_ends(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.size = 20_000_000
    monkeypatch.setattr("agent.checkpoints.tiers.remote_folder._COPY_BYTES", 10_000)
    machine.launch()
    machine.save(10)
    folder = tmp_path / "remote" / JOB / "step-000000010"
    wait_for(lambda: folder.exists() and any(folder.iterdir()), "the step is being copied")
    machine.tiers.close()
    assert not list(folder.glob("*.part"))
    assert machine.steps() == {0: [10], 1: [10]}, "the copies on disk are kept"
