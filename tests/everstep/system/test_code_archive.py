"""The digest of a snapshot, and how damaged or hostile archives are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import DamagedCode
from everstep.system import code_archive
from everstep.system.code_archive import CodeFile, Packer, digest_of, leaves, read_archive, unpack

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in {".", ".."}
)
FILES = st.dictionaries(NAMES, st.tuples(st.sampled_from("fx"), st.binary(max_size=40)), max_size=6)


def packed(files: dict[str, tuple[str, bytes]], *, reverse: bool = False) -> tuple[bytes, str]:
    """Return an archive of files, and their digest."""
    output = io.BytesIO()
    with Packer(output) as packer:
        held = [packer.add(name, *files[name]) for name in sorted(files, reverse=reverse)]
    return output.getvalue(), digest_of(held)


@given(FILES)
def test_equal_files_have_equal_digests_and_are_unpacked_unchanged(
    files: dict[str, tuple[str, bytes]],
) -> None:
    archive, digest = packed(files)
    other, other_digest = packed(files, reverse=True)
    unpacked: dict[str, tuple[str, bytes]] = {}

    def take(file: CodeFile, contents: bytes) -> None:
        unpacked[file.path] = (file.kind, contents)

    assert digest == other_digest == digest_of(read_archive(io.BytesIO(other)))
    assert digest_of(read_archive(io.BytesIO(archive), take)) == digest
    assert unpacked == files
    assert archive == packed(files)[0]


@given(FILES, st.data())
def test_a_change_of_a_byte_a_mode_or_a_name_changes_the_digest(
    files: dict[str, tuple[str, bytes]], data: st.DataObject
) -> None:
    digest = packed(files)[1]
    fresh = data.draw(NAMES.filter(lambda name: name not in files))
    assert packed(files | {fresh: ("f", b"")})[1] != digest
    if not files:
        return
    name = data.draw(st.sampled_from(sorted(files)))
    kind, contents = files[name]
    rest = {other: file for other, file in files.items() if other != name}
    assert packed(rest)[1] != digest
    assert packed(rest | {fresh: (kind, contents)})[1] != digest
    assert packed(rest | {name: ("x" if kind == "f" else "f", contents)})[1] != digest
    position = data.draw(st.integers(0, len(contents)))
    assert packed(rest | {name: (kind, contents[:position] + b"+" + contents[position:])})[1] != digest
    if contents:
        at = min(position, len(contents) - 1)
        other_byte = bytes([contents[at] ^ 1])
        assert packed(rest | {name: (kind, contents[:at] + other_byte + contents[at + 1 :])})[1] != digest


def test_the_digest_is_computed_as_documented() -> None:
    contents = hashlib.sha256(b"print()\n").hexdigest()
    said = hashlib.sha256(f"x {contents} a/run.py\0f {contents} b.py\0".encode()).hexdigest()
    assert packed({"b.py": ("f", b"print()\n"), "a/run.py": ("x", b"print()\n")})[1] == said


def test_files_links_and_modes_are_unpacked_unchanged(tmp_path: Path) -> None:
    output = io.BytesIO()
    with Packer(output) as packer:
        held = [
            packer.add("a/b/run.sh", "x", b"#!/bin/sh\n"),
            packer.add("now", "l", b"a/b"),
            packer.add("é.py", "f", b""),
        ]
    files = unpack(io.BytesIO(output.getvalue()), tmp_path / "code", digest_of(held))

    assert files == held
    assert (tmp_path / "code/now/run.sh").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "code/now").is_symlink()
    assert stat.S_IMODE((tmp_path / "code/a/b/run.sh").stat().st_mode) == 0o500
    assert stat.S_IMODE((tmp_path / "code/é.py").stat().st_mode) == 0o400
    assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o700


def test_a_snapshot_with_another_digest_is_refused(tmp_path: Path) -> None:
    archive, digest = packed({"job.py": ("f", b"1")})
    with pytest.raises(DamagedCode, match=f"and not {'0' * 12}"):
        unpack(io.BytesIO(archive), tmp_path / "code", "0" * 64)
    unpack(io.BytesIO(archive), tmp_path / "again", digest)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9, 0.99])
def test_damage_anywhere_is_noticed(at: float) -> None:
    archive, digest = packed({f"{n}.py": ("f", bytes(range(256)) * 8) for n in range(8)})
    place = int(len(archive) * at)
    with pytest.raises(DamagedCode):
        read_archive(io.BytesIO(archive[:place]))
    broken = bytearray(archive)
    broken[place] ^= 0x10
    try:
        found = digest_of(read_archive(io.BytesIO(bytes(broken))))
    except DamagedCode:
        return
    assert found != digest


def tarred(*entries: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    """Return an archive that ``Packer`` would not write, but another program may."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for entry, contents in entries:
            entry.size = len(contents)
            tar.addfile(entry, io.BytesIO(contents))
    return io.BytesIO(output.getvalue())


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """Return the header of an archive's entry."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("/etc/passwd")], "no path within"),
        ([entry("../job.py")], "no path within"),
        ([entry("a/../../job.py")], "no path within"),
        ([entry("a//b.py")], "no path within"),
        ([entry("./a.py")], "no path within"),
        ([entry("here", tarfile.SYMTYPE, "/etc")], "leaves"),
        ([entry("a/here", tarfile.SYMTYPE, "../../b")], "leaves"),
        ([entry("hard", tarfile.LNKTYPE, "job.py")], "neither a file nor a link"),
        ([entry("device", tarfile.CHRTYPE)], "neither a file nor a link"),
        ([entry("pipe", tarfile.FIFOTYPE)], "neither a file nor a link"),
        ([entry("folder", tarfile.DIRTYPE)], "neither a file nor a link"),
        ([entry("job.py"), entry("job.py")], "twice"),
    ],
)
def test_entries_that_no_snapshot_has_are_refused(entries: list[tarfile.TarInfo], said: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedCode, match=said):
        unpack(tarred(*((one, b"") for one in entries)), tmp_path / "code", "0" * 64)
    assert [path.name for path in tmp_path.rglob("*")] in (["code"], ["code", "job.py"])


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    through = tarred((entry("a", tarfile.SYMTYPE, "b"), b""), (entry("a/job.py"), b"1"))
    with pytest.raises(DamagedCode, match="within another one"):
        unpack(through, tmp_path / "code", "0" * 64)


def test_a_snapshot_beyond_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, _ = packed({f"{n}.py": ("f", b"0" * 50) for n in range(6)})
    monkeypatch.setattr(code_archive, "MAX_FILES", 5)
    with pytest.raises(DamagedCode, match="more than 5 files"):
        read_archive(io.BytesIO(archive))
    monkeypatch.setattr(code_archive, "MAX_FILES", 6)
    assert len(read_archive(io.BytesIO(archive))) == 6
    monkeypatch.setattr(code_archive, "MAX_BYTES", 299)
    with pytest.raises(DamagedCode, match="or 299 bytes"):
        read_archive(io.BytesIO(archive))
    monkeypatch.setattr(code_archive, "MAX_FILE_BYTES", 49)
    with pytest.raises(DamagedCode, match="at most 49"):
        read_archive(io.BytesIO(archive))


def test_an_archive_that_unpacks_to_far_too_much_is_abandoned_early() -> None:
    archive, _ = packed({"job.py": ("f", b"1")})
    zeros = gzip.compress(bytes(16 << 20), 1)  # zeros are allowed at the end of an archive
    source = io.BytesIO(archive + zeros * 60)
    with pytest.raises(DamagedCode, match="unpacks to more"):
        read_archive(source)
    assert source.tell() < len(archive) + len(zeros) * 20


@pytest.mark.parametrize(
    ("path", "target", "out"),
    [
        ("a", "b", False),
        ("a/b", "../c", False),
        ("a/b", "../../c", True),
        ("a", "..", True),
        ("a", "b/../../c", True),
        ("a", "/etc", True),
        ("a/b", ".", False),
        ("a", "..b", False),
    ],
)
def test_a_link_may_not_leave_the_snapshot(path: str, target: str, out: bool) -> None:
    assert leaves(path, target) is out
