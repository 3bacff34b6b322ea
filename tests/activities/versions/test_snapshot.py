"""Which files a snapshot has, compared with real git, and which folders are refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from activities.versions import listing, snapshot
from activities.versions.git import GitFolder
from activities.versions.listing import files_of
from activities.versions.snapshot import folder_snapshot, revision_snapshot
from everstep.errors import ConfigError
from everstep.system.code_archive import read_archive, unpack
from tests.activities.versions.repository import Repository


def test_in_git_it_is_what_is_tracked_and_what_is_neither_tracked_nor_ignored(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1", _gitignore="*.bin\n", forced="1", gone_py="1", code__a_py="1")
    (repository.folder / "forced.bin").write_text("tracked all the same")
    repository.git("add", "--force", "forced.bin")
    repository.commit("first")
    repository.write(fresh_py="1")
    (repository.folder / "code/__pycache__").mkdir()
    (repository.folder / "code/__pycache__/a.pyc").write_text("")
    (repository.folder / "ignored.bin").write_text("")
    (repository.folder / "gone.py").unlink()

    assert files_of(repository.folder) == [".gitignore", "code/a.py", "forced", "forced.bin", "fresh.py", "job.py"]
    assert files_of(repository.folder / "code") == ["a.py"]


def test_submodules_and_repositories_within_are_taken_along(tmp_path: Path) -> None:
    other = Repository(tmp_path / "other")
    other.write(lib_py="1", skipped="1", _gitignore="skipped\n")
    commit = other.commit("a library")
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1")
    repository.git("-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(other.folder), "third/lib")
    repository.commit("with a submodule")
    Repository(repository.folder / "beside").write(own_py="1")
    expected = [".gitmodules", "beside/own.py", "job.py", "third/lib/.gitignore", "third/lib/lib.py"]

    assert files_of(repository.folder) == expected
    with revision_snapshot(repository.folder, "HEAD") as made:
        assert [file.path for file in made.files] == [name for name in expected if not name.startswith("beside")]
    shutil.rmtree(repository.folder / "third/lib")
    (repository.folder / "third/lib").mkdir()
    with pytest.raises(ConfigError, match="submodule update --init"):
        revision_snapshot(repository.folder, "HEAD")
    assert commit


def test_outside_of_git_hidden_folders_and_environments_are_no_code(tmp_path: Path) -> None:
    for name in (
        "job.py",
        ".env.py",
        ".cache/x.py",
        "venv/pyvenv.cfg",
        "venv/lib/y.py",
        "__pycache__/job.pyc",
        "a/b.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("socket")
        os.mkfifo(tmp_path / "pipe")
        with folder_snapshot(tmp_path) as made:
            assert [file.path for file in made.files] == [".env.py", "a/b.py", "job.py"]


def test_a_revision_gives_the_same_digest_as_the_folder_that_is_clean_at_it(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(lib__job_py="print(1)\n", lib__data__a="x" * 1000, other_py="1")
    (repository.folder / "lib/run.sh").write_text("#!/bin/sh\n")
    (repository.folder / "lib/run.sh").chmod(0o755)
    (repository.folder / "lib/now").symlink_to("data/a")
    (repository.folder / ".gitattributes").write_text("data export-ignore\n* export-subst\n")
    first = repository.commit("First: all of it\n\nAnd a body.")
    with folder_snapshot(repository.folder / "lib") as clean:
        assert (clean.origin.commit, clean.origin.dirty) == (first, False)
    assert (clean.origin.author, clean.origin.subject) == ("Ada <ada@example.org>", "First: all of it")
    repository.write(lib__job_py="print(2)\n")
    with (
        folder_snapshot(repository.folder / "lib") as changed,
        revision_snapshot(repository.folder / "lib", "HEAD") as at,
    ):
        assert (changed.origin.commit, changed.origin.dirty) == (first, True)
        assert changed.digest != clean.digest == at.digest
        assert (at.origin.commit, at.origin.dirty, at.files) == (first, False, clean.files)
        unpack(at.archive, tmp_path / "unpacked", at.digest)
    assert (tmp_path / "unpacked/job.py").read_text() == "print(1)\n"
    assert {file.path: file.kind for file in at.files} == {"data/a": "f", "job.py": "f", "now": "l", "run.sh": "x"}


@pytest.mark.parametrize("revision", ["nothing", "--all", "HEAD:lib", ""])
def test_a_revision_that_is_none_is_refused(revision: str, tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(lib__job_py="1")
    repository.commit("one")
    with pytest.raises(ConfigError, match=r"is not a revision|has no revision"):
        revision_snapshot(repository.folder, revision)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        folder_snapshot(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not in a git repository"):
        revision_snapshot(tmp_path, "HEAD")
    with pytest.raises(ConfigError, match="nothing to run"):
        folder_snapshot(tmp_path)


def test_a_repository_without_a_commit_has_no_origin_but_its_folder(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1")
    with folder_snapshot(repository.folder) as made:
        assert (made.origin.folder, made.origin.commit, made.origin.dirty) == (str(repository.folder), "", False)


def test_nothing_that_a_repository_names_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1", other_py="1")
    (repository.folder / ".gitattributes").write_text("job.py filter=f.g=h\nother.py filter=long\n")
    repository.commit("one")
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho >> {ran}\n")
    program.chmod(0o755)
    filters = ("filter.f.g=h.clean", "filter.f.g=h.smudge", "filter.long.process")
    for setting in ("core.fsmonitor", "core.pager", "diff.external", "core.sshCommand", "gpg.program", *filters):
        repository.git("config", setting, str(program))
    repository.git("config", "log.showSignature", "true")
    repository.git("config", "filter.long.required", "true")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    repository.write(job_py="2", other_py="2")

    with folder_snapshot(repository.folder) as made, revision_snapshot(repository.folder, "main") as at:
        assert made.digest != at.digest
    assert not ran.exists()


def test_the_filter_of_a_submodule_is_not_run_and_its_changes_count(tmp_path: Path) -> None:
    other, repository = Repository(tmp_path / "other"), Repository(tmp_path / "git")
    other.write(lib_py="1")
    (other.folder / ".gitattributes").write_text("lib.py filter=f\n")
    other.commit("lib")
    repository.git("-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(other.folder), "lib")
    repository.commit("one")
    assert not GitFolder(repository.folder).is_dirty()
    inner, ran = repository.folder / "lib", tmp_path / "ran"
    repository.git("-C", str(inner), "config", "filter.f.clean", f"sh -c 'echo >> {ran}; cat'")
    (inner / "lib.py").write_text("2")
    assert GitFolder(repository.folder).is_dirty()
    assert not ran.exists()


def test_a_partial_clone_fetches_nothing(tmp_path: Path) -> None:
    """A fetch would run the program that the repository's settings name as its remote."""
    repository, ran = Repository(tmp_path / "git"), tmp_path / "ran"
    repository.write(job_py="1")
    repository.commit("one")
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::touch {ran}",
        "protocol.ext.allow": "always",
    }
    for name, value in settings.items():
        repository.git("config", name, value)
    identifier = repository.git("rev-parse", "HEAD:job.py").strip()
    (repository.folder / ".git" / "objects" / identifier[:2] / identifier[2:]).unlink()

    with pytest.raises(ConfigError, match="partial clone"):
        revision_snapshot(repository.folder, "main")
    assert not ran.exists()
    with pytest.raises(subprocess.CalledProcessError):
        repository.git("cat-file", "-p", identifier)
    assert ran.exists(), "the settings of this test name no program that git would run"


def test_of_a_file_of_git_lfs_a_folder_has_the_contents_and_a_revision_the_pointer(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    repository.write(job_py="1")
    repository.git("config", "filter.lfs.clean", f"printf '{pointer}'")
    (repository.folder / ".gitattributes").write_text("*.bin filter=lfs\n")
    (repository.folder / "vocabulary.bin").write_text("a whole")
    repository.commit("one")

    with folder_snapshot(repository.folder) as folder, revision_snapshot(repository.folder, "main") as revision:
        for made in (folder, revision):
            unpack(made.archive, tmp_path / made.digest, made.digest)
        assert (tmp_path / folder.digest / "vocabulary.bin").read_text() == "a whole"
        assert (tmp_path / revision.digest / "vocabulary.bin").read_text() == pointer


def test_the_archive_holds_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.py").write_bytes(b"x" * 100)
    with folder_snapshot(tmp_path) as made:
        assert read_archive(made.archive) == made.files
        assert made.archive_bytes == made.archive.tell()
        assert made.bytes == 100


def test_what_is_too_large_is_refused_with_its_names_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text("1")
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/train.bin").open("wb") as file:
        file.truncate(30_000_000)
    with pytest.raises(ConfigError) as refused:
        folder_snapshot(tmp_path)
    for said in ("data/train.bin (30.0 MB)", ".gitignore", "--code DIR", "in place", "25.0 MB a file"):
        assert said in str(refused.value)
    assert "job.py" not in str(refused.value)

    (tmp_path / ".gitignore").write_text("data/\n")
    folder_snapshot(tmp_path).archive.close()
    monkeypatch.setattr(snapshot, "MAX_FILES", 1)
    with pytest.raises(ConfigError, match=r"too many files for a version of code, 2, most of them in \. \(2\)"):
        folder_snapshot(tmp_path)
    monkeypatch.setattr(listing, "MAX_SEEN", 1)
    with pytest.raises(ConfigError, match="more than 1 files"):
        folder_snapshot(tmp_path)
    monkeypatch.setattr(snapshot, "MAX_BYTES", 2)
    with pytest.raises(ConfigError, match="too large"):
        monkeypatch.setattr(listing, "MAX_SEEN", 10)
        folder_snapshot(tmp_path)


@pytest.mark.parametrize("target", ["/etc", "../other", "a/../../other"])
def test_links_that_leave_are_refused(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (folder / "job.py").write_text("1")
    (folder / "data").symlink_to(target)
    with pytest.raises(ConfigError, match="data is a link to a place outside of the folder"):
        folder_snapshot(folder)


def test_a_link_that_leaves_by_another_one_is_refused_and_one_that_leads_nowhere_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "here").symlink_to(".")
    (folder / "lost").symlink_to("nothing")
    with folder_snapshot(folder) as made:
        assert [(file.path, file.kind) for file in made.files] == [("here", "l"), ("lost", "l")]
    (folder / "out").symlink_to("here/..")
    with pytest.raises(ConfigError, match="out is a link"):
        folder_snapshot(folder)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("1")
    with pytest.raises(ConfigError, match=r"caf\\xe9.py in .* is not UTF-8"):
        folder_snapshot(tmp_path)


def test_where_git_fails_its_own_words_are_told(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1")
    (repository.folder / ".git/HEAD").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"'git ls-files' in .*: fatal: "):
        folder_snapshot(repository.folder)


def test_files_of_a_conflict_are_there_once(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "git")
    repository.write(job_py="1")
    repository.commit("one")
    repository.git("checkout", "--quiet", "-b", "side")
    repository.write(job_py="2")
    repository.commit("two")
    repository.git("checkout", "--quiet", "main")
    repository.write(job_py="3")
    repository.commit("three")
    with pytest.raises(subprocess.CalledProcessError):
        repository.git("merge", "side")
    assert files_of(repository.folder) == ["job.py"]
