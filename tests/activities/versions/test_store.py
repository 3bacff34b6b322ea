"""The store of versions, in a folder and through fsspec."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
import uuid
from pathlib import Path

import pytest

from activities.versions import store as store_module
from activities.versions.snapshot import CodeSnapshot, folder_snapshot
from activities.versions.store import VersionStore
from everstep.decisions.act.versions import prune
from everstep.errors import ConfigError, VersionStoreError
from everstep.model.version import CodeVersion, Origin
from everstep.system.code_archive import digest_of


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> VersionStore:
    """An empty store."""
    places = {
        "folder": str(tmp_path / "versions"),
        "file": f"file://{tmp_path}/versions/",
        "memory": f"memory://{uuid.uuid4().hex}/versions",
    }
    return VersionStore(places[request.param])


def snapshot(folder: Path, text: str = "print(1)\n") -> CodeSnapshot:
    """A snapshot of a folder with a script."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(text)
    return folder_snapshot(folder)


def version(code: str, *args: str) -> CodeVersion:
    return CodeVersion(
        code=code, script="job.py", args=list(args), packages={"torch": "2.11"}, origin=Origin(folder="/x")
    )


def contents(store: VersionStore, digest: str) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with await store.code(digest) as code:
            code.read(lambda file, data: found.update({file.path: data}))
        return found

    return asyncio.run(read())


def test_a_stored_version_is_read_back(store: VersionStore, tmp_path: Path) -> None:
    with snapshot(tmp_path / "code") as made:
        asyncio.run(store.put("gpt", version(made.digest), made))
        asyncio.run(store.put("gpt", version(made.digest, "--steps"), made))
    assert contents(store, made.digest) == {"job.py": b"print(1)\n"}
    bare = version(made.digest).model_copy(update={"packages": {}, "origin": Origin()})
    assert asyncio.run(store.full("gpt", bare)) == version(made.digest)
    other = version(made.digest, "--other")
    assert asyncio.run(store.full("gpt", other)) == other
    assert asyncio.run(store.full("other", bare)) == bare


def test_a_version_that_runs_in_place_has_a_record_and_no_code(store: VersionStore) -> None:
    asyncio.run(store.put("gpt", version(""), None))
    assert asyncio.run(store.full("gpt", version("").model_copy(update={"packages": {}}))) == version("")


def test_the_error_about_missing_code_names_the_store(store: VersionStore) -> None:
    with pytest.raises(VersionStoreError, match=r"000000000000 is not in the store of versions .*versions: it was"):
        asyncio.run(store.code("0" * 64))
    with pytest.raises(VersionStoreError, match="no digest"):
        asyncio.run(store.code("../../etc/passwd"))


def test_damaged_code_is_noticed_and_can_be_stored_again(tmp_path: Path) -> None:
    store = VersionStore(str(tmp_path / "versions"))
    with snapshot(tmp_path / "code") as made, snapshot(tmp_path / "code", "print(2)\n") as other:
        asyncio.run(store.put("gpt", version(made.digest), made))
        file = tmp_path / f"versions/code/{made.digest}.tar.gz"
        other.archive.seek(0)
        for damage in (b"nonsense", file.read_bytes()[:-20], other.archive.read()):
            file.write_bytes(damage)
            with pytest.raises(VersionStoreError, match="is damaged"):
                asyncio.run(store.code(made.digest))
        asyncio.run(store.put("gpt", version(made.digest), made))
    assert contents(store, made.digest) == {"job.py": b"print(1)\n"}


def test_a_damaged_or_exchanged_record_is_refused(tmp_path: Path) -> None:
    store = VersionStore(str(tmp_path / "versions"))
    asyncio.run(store.put("gpt", version(""), None))
    [record] = (tmp_path / "versions/jobs/gpt").iterdir()
    for damage in ("{", version("", "--other").model_dump_json()):
        record.write_text(damage)
        with pytest.raises(VersionStoreError, match="is damaged"):
            asyncio.run(store.full("gpt", version("")))


def test_the_new_folder_is_private_and_has_no_partial_files(tmp_path: Path) -> None:
    store = VersionStore(str(tmp_path / "versions"))
    with snapshot(tmp_path / "code") as made:
        asyncio.run(store.put("gpt", version(made.digest), made))
    assert stat.S_IMODE((tmp_path / "versions").stat().st_mode) == 0o700
    names = [path.name for path in (tmp_path / "versions").rglob("*") if path.is_file()]
    assert sorted(names) == sorted([f"{made.digest}.tar.gz", f"{version(made.digest).id}.{made.digest}.json"])


async def test_concurrent_writers_leave_only_complete_code(tmp_path: Path) -> None:
    stores = [VersionStore(str(tmp_path / "versions")) for _ in range(6)]
    made = [snapshot(tmp_path / f"code-{number % 2}", f"print({number % 2})\n" * 20_000) for number in range(6)]
    await asyncio.gather(
        *(store.put("gpt", version(one.digest), one) for store, one in zip(stores, made, strict=True)),
    )
    for one in made[:2]:
        with await stores[0].code(one.digest) as code:
            assert digest_of(code.files) == one.digest
    for one in made:
        one.archive.close()
    assert len(list((tmp_path / "versions/code").iterdir())) == 2


def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ANSWER_S", 0.2)
    store, go_on = VersionStore(str(tmp_path / "versions")), threading.Event()
    monkeypatch.setattr(store._jobs, "write", lambda *_: go_on.wait())
    with pytest.raises(VersionStoreError, match=r"versions cannot keep a version of gpt: it has not answered for 0 s"):
        asyncio.run(store.put("gpt", version(""), None))
    go_on.set()


def test_a_store_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions/jobs").write_text("a file where a folder has to be")
    with pytest.raises(VersionStoreError, match=r"versions cannot keep a version of gpt: .*EVERSTEP_VERSIONS"):
        asyncio.run(VersionStore(str(tmp_path / "versions")).put("gpt", version(""), None))


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="EVERSTEP_VERSIONS nonsense://x cannot be used"):
        VersionStore("nonsense://x")


def test_unneeded_versions_are_removed(store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "KEPT", 1)
    monkeypatch.setattr(prune, "YOUNG_S", -1.0)
    made = []
    for number in range(4):
        with snapshot(tmp_path / "code", f"print({number})\n") as one:
            asyncio.run(store.put("gpt" if number else "other", version(one.digest), one))
        made.append(version(one.digest))
        time.sleep(0.02)
    going = asyncio.run(store.prune("gpt", {made[1].id}))

    assert [one.id for one in going.versions] == [made[2].id]
    assert going.code == [made[2].code]
    for kept in (made[0], made[1], made[3]):
        assert contents(store, kept.code)
    with pytest.raises(VersionStoreError, match="is not in the store"):
        asyncio.run(store.code(made[2].code))
    assert asyncio.run(store.prune("gpt", {made[1].id})).versions == []


def test_code_that_is_used_again_counts_as_new(tmp_path: Path) -> None:
    store = VersionStore(str(tmp_path / "versions"))
    with snapshot(tmp_path / "code") as made:
        asyncio.run(store.put("gpt", version(made.digest), made))
        file = tmp_path / f"versions/code/{made.digest}.tar.gz"
        long_ago = time.time() - 2 * prune.YOUNG_S
        os.utime(file, (long_ago, long_ago))
        asyncio.run(store.put("other", version(made.digest), made))
    assert time.time() - file.stat().st_mtime < prune.YOUNG_S


def test_a_failed_pruning_is_only_logged(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    store = VersionStore(str(tmp_path / "versions"))

    def fails(*_: object) -> None:
        raise OSError(5, "no")

    store._jobs.ages = fails  # type: ignore[method-assign, assignment]
    assert asyncio.run(store.prune("gpt", set())).versions == []
