"""The remote tier with a server that speaks S3. ``make s3`` runs this test in an environment that has such a server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from agent.checkpoints.tiers.background import Gate
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from agent.checkpoints.tiers.storage_check import remote_problem
from everstep.errors import CopyInterrupted
from tests.agent.checkpoints.tiers.tier_job import JOB, REMOTE, Machine, wait_for

s3fs = pytest.importorskip("s3fs", reason="make s3 runs it")
server = pytest.importorskip("moto.server", reason="make s3 runs it")
pytestmark = pytest.mark.filterwarnings("default")

URL = "s3://bucket/runs"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty bucket on a separate server."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    address = f"http://{host}:{port}"
    urlopen(
        Request(f"{address}/moto-api/reset", method="POST")
    ).close()  # the server's state lives as long as the process
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


@pytest.fixture
def pair(tmp_path: Path, bucket: None) -> Iterator[list[Machine]]:
    made = [
        Machine(tmp_path, name=name, ranks=ranks, world=4, remote_url=URL)
        for name, ranks in {"m1": (0, 1), "m2": (2, 3)}.items()
    ]
    yield made
    for machine in made:
        machine.close()


def both(machines: list[Machine], step: int) -> None:
    for machine in machines:
        machine.save(step)
    for machine in machines:
        machine.on_remote(step)


def test_machines_that_lost_everything_restore_what_was_copied(pair: list[Machine]) -> None:
    for machine in pair:
        machine.launch()
    for step in (10, 20, 30, 40):
        both(pair, step)
    found = [one for one in pair[1].held(remote_url=URL, verify=True) if one.tier == REMOTE]
    assert {one.rank for one in found if one.completed_steps == 40 and one.valid} == {0, 1, 2, 3}
    assert not [one for one in found if one.completed_steps == 10], "old steps are deleted"
    for machine in pair:
        machine.lose_memory()
        shutil.rmtree(machine.place.state_dir)
        for rank in machine.ranks_here:
            assert machine.restore(rank, 40, REMOTE) > machine.size
            assert machine.holds(rank, 40)


def test_an_abandoned_future_is_set_aside_and_copied_anew(pair: list[Machine]) -> None:
    machine = pair[0]
    machine.launch()
    for step in (10, 20):
        machine.save(step)
        machine.on_remote(step)
    machine.tiers.shut()
    machine.launch(generation=2, resume_step=10)
    wait_for(lambda: machine.saved.of(0).remote_step == 10, "the later steps are not counted any more")
    names = RemoteFolder(URL, JOB).sizes()
    assert "step-000000020/rank-0.json.abandoned-g2" in names
    assert "step-000000020/rank-0.json" not in names
    machine.save(20)
    machine.on_remote(20)
    found = [one for one in machine.held(remote_url=URL, verify=True) if one.tier == REMOTE]
    assert {(one.completed_steps, one.generation) for one in found if one.valid} == {(10, 1), (20, 2)}


def test_another_machines_writes_are_seen_and_its_overwritten_file_is_read_anew(bucket: None, tmp_path: Path) -> None:
    local = tmp_path / "shard"
    local.write_bytes(b"1" * 1000)
    folder, other = RemoteFolder(URL, JOB), s3fs.S3FileSystem(skip_instance_cache=True)
    folder.put(local, "step-1/a", Gate())
    assert folder.sizes() == {"step-1/a": 1000}
    other.pipe_file(f"bucket/runs/{JOB}/step-1/a", b"22")
    other.pipe_file(f"bucket/runs/{JOB}/step-1/b", b"333")
    with folder.reading("step-1/a") as read:
        buffer = bytearray(10)
        assert (read(0, memoryview(buffer)), bytes(buffer[:2])) == (2, b"22")
    assert folder.sizes() == {"step-1/a": 2, "step-1/b": 3}
    folder.remove("step-1")
    folder.remove("step-1")
    assert folder.sizes() == {}


def test_an_upload_that_is_given_up_leaves_no_object_and_no_parts(
    bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, gate, moved = tmp_path / "shard", Gate(), []
    local.write_bytes(bytes(160 << 20))

    def pace(size: int) -> None:
        moved.append(size)
        gate.end(0)
        gate(size)

    folder = RemoteFolder(URL, JOB)
    with pytest.raises(CopyInterrupted):
        folder.put(local, "step-1/a", pace)
    assert 0 < sum(moved) < 160 << 20
    assert folder.sizes() == {}
    assert not s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def test_a_bucket_is_neither_made_nor_taken_for_an_empty_one(bucket: None, tmp_path: Path) -> None:
    assert remote_problem(URL, JOB) == ""
    assert RemoteFolder(URL, JOB).sizes() == {}
    assert "s3://mistyped/runs does not exist" in remote_problem("s3://mistyped/runs", JOB)
    with pytest.raises(FileNotFoundError):
        RemoteFolder("s3://mistyped/runs", JOB).sizes()
