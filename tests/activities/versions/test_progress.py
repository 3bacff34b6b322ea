"""If a snapshot takes long, its progress is shown at intervals."""

from __future__ import annotations

import asyncio
from pathlib import Path

from activities.versions.progress import SnapshotProgress, showing_progress
from activities.versions.snapshot import folder_snapshot


def test_a_snapshot_shows_its_progress(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.py").write_text("a" * 1000)
    progress = SnapshotProgress()
    assert progress.text == "snapshot of the code: listing its files"
    with folder_snapshot(tmp_path, progress):
        assert (progress.files, progress.of, progress.bytes) == (20, 20, 20_000)
    assert progress.text == "snapshot of the code: 20 files, 0.0 MB, written to the store of versions"


def test_each_line_is_shown_once_and_no_line_after_the_end() -> None:
    async def work() -> list[str]:
        told: list[str] = []
        async with showing_progress(told.append, every_s=0.001) as progress:
            progress.of = 10
            for files in (3, 3, 7):
                progress.files = files
                while not told or f" {files} of 10" not in told[-1]:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.001)
        before = len(told)
        progress.files = 9
        await asyncio.sleep(0.02)
        assert len(told) == before
        return told

    told = asyncio.run(work())
    assert [line.partition("code: ")[2] for line in told] == ["3 of 10 files, 0.0 MB", "7 of 10 files, 0.0 MB"]
