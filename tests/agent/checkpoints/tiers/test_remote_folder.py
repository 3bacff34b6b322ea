"""Remote storage through fsspec: file systems and object stores behave alike, and a missing driver is named."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.callbacks import Callback
from fsspec.implementations.memory import MemoryFileSystem

from agent.checkpoints.tiers.background import Gate
from agent.checkpoints.tiers.remote_folder import PART, RemoteFolder
from everstep.errors import ConfigError, CopyInterrupted


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """An object store. It cannot move objects, and an object appears only when it is complete."""

    protocol = "bucket"
    store: dict[str, object] = {}  # noqa: RUF012 - as the base class has it
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, *_: object, **__: object) -> None:
        raise AssertionError("an object store copies the data when it is asked to move")

    def makedirs(self, *_: object, **__: object) -> None:
        raise AssertionError("an object store would make a bucket even if its name is mistyped")

    def put_file(self, lpath: str, rpath: str, callback: Callback, **_: object) -> None:
        """Write an object in parts. It exists only after the last part."""
        data = b""
        with Path(lpath).open("rb") as file:
            while part := file.read(8 << 20):
                data += part
                callback.relative_update(len(part))
        self.pipe_file(rpath, data)


@pytest.fixture(params=["file", "memory", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteFolder]:
    register_implementation("bucket", Bucket, clobber=True)
    where = str(tmp_path / "remote") if request.param == "file" else f"/{uuid.uuid4().hex}"
    yield RemoteFolder(f"{request.param}://{where}", "gpt")
    Bucket.store.clear()
    MemoryFileSystem.store.clear()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(20_000_000))
    return path


def test_a_file_is_stored_read_and_removed(folder: RemoteFolder, local: Path) -> None:
    assert folder.sizes() == {}
    folder.put(local, "step-1/rank-0.safetensors", Gate())
    assert folder.sizes() == {"step-1/rank-0.safetensors": 20_000_000}
    with folder.reading("step-1/rank-0.safetensors") as read:
        buffer = memoryview(bytearray(1000))
        assert read(10_000_000, buffer) == 1000
        assert buffer == local.read_bytes()[10_000_000:10_001_000]
        assert read(20_000_000, buffer) == 0
    assert folder.ranges("step-1/rank-0.safetensors", [(0, 3), (7_000_000, 7_000_100)]) == [
        local.read_bytes()[:3],
        local.read_bytes()[7_000_000:7_000_100],
    ]
    folder.put(local, "step-1/rank-0.json", Gate())
    assert folder.read(["step-1/rank-0.json", "step-1/rank-7.json"]) == {"step-1/rank-0.json": local.read_bytes()}
    folder.remove("step-1")
    folder.remove("step-1")
    assert folder.sizes() == {}


def test_an_interrupted_copy_leaves_nothing(folder: RemoteFolder, local: Path, tmp_path: Path) -> None:
    gate, moved = Gate(), []

    def pace(size: int) -> None:
        moved.append(size)
        if sum(moved) > 10_000_000:
            gate.end(0)
        gate(size)

    with pytest.raises(CopyInterrupted):
        folder.put(local, "step-1/rank-0.safetensors", pace)
    assert 10_000_000 < sum(moved) < 20_000_000
    assert folder.sizes() == {}
    assert not list(tmp_path.rglob(f"*{PART}"))


def test_a_partial_file_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / f"rank-0.safetensors.abc{PART}").write_bytes(b"half")
    assert RemoteFolder(f"file://{tmp_path}", "gpt").sizes() == {}


@pytest.mark.parametrize(
    ("url", "said"),
    [("s3://runs/a", "Install s3fs"), ("gs://runs", "install gcsfs"), ("nonsense://runs", "Give an fsspec URL")],
)
def test_a_missing_driver_is_named(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"remote_url {url} .*{said}"):
        RemoteFolder(url, "gpt")


def test_a_file_that_cannot_be_read_is_not_reported_as_missing(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_implementation("bucket", Bucket, clobber=True)
    folder = RemoteFolder("bucket:///runs", "gpt")
    folder.put(local, "step-1/rank-0.json", Gate())

    def denied(*_: object, **__: object) -> bytes:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(Bucket, "cat_file", denied)
    with pytest.raises(PermissionError):
        folder.read(["step-1/rank-0.json"])
    Bucket.store.clear()


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_bucket_is_not_an_empty_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    register_implementation("bucket", Bucket, clobber=True)

    def find(*_: object, **__: object) -> dict[str, object]:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(Bucket, "find", find)
    monkeypatch.setattr(Bucket, "exists", lambda *_: there)
    folder = RemoteFolder("bucket:///runs", "gpt")
    if there:
        assert folder.sizes() == {}
    else:
        with pytest.raises(FileNotFoundError, match="bucket"):
            folder.sizes()


def test_a_listing_from_a_drivers_cache_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    register_implementation("bucket", Bucket, clobber=True)
    folder, forgotten = RemoteFolder("bucket:///runs", "gpt"), []
    monkeypatch.setattr(Bucket, "invalidate_cache", lambda *_: forgotten.append("all"))
    folder.sizes()
    with pytest.raises(FileNotFoundError), folder.reading("step-1/rank-0.safetensors"):
        pass
    assert len(forgotten) == 2
