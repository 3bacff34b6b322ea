"""Which folders count as private, and which folders are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep.errors import ConfigError
from everstep.system import private_files as private
from tests.strangers import NOBODY, needs_another_user


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_missing_folders_are_created_for_their_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (mode(made), mode(made.parent)) == (0o700, 0o700)
    assert private.make_folder(made) == made


def test_a_folder_that_others_can_read_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert mode(private.make_folder(tmp_path)) == 0o700


@pytest.mark.parametrize("open_mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, open_mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(open_mode)
    with pytest.raises(ConfigError, match=f"writable for other users .*{open_mode:04o}"):
        private.make_folder(tmp_path / "open")
    assert mode(tmp_path / "open") == open_mode


@pytest.mark.parametrize(("parent", "fine"), [(0o777, False), (0o1777, True), (0o755, True), (0o770, True)])
def test_a_parent_where_others_can_rename_is_refused(tmp_path: Path, parent: int, *, fine: bool) -> None:
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(parent)
    if fine:  # our own group may write, and in a sticky folder others cannot rename our entries
        private.make_folder(tmp_path / "above" / "own")
        return
    with pytest.raises(ConfigError, match=r"above .* writable for other users"):
        private.make_folder(tmp_path / "above" / "own")


def test_a_parent_of_another_group_is_refused(tmp_path: Path) -> None:
    needs_another_user()
    (tmp_path / "above").mkdir()
    os.chown(tmp_path / "above", 0, NOBODY)
    (tmp_path / "above").chmod(0o770)
    with pytest.raises(ConfigError, match=r"above .* writable for other users"):
        private.make_folder(tmp_path / "above" / "own")


def test_only_our_own_links_are_followed_and_only_above_the_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a link"):
        private.make_folder(tmp_path / "link")
    assert (private.make_folder(tmp_path / "link" / "own")).is_dir()
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'real'}, above .* writable"):
        private.make_folder(tmp_path / "link" / "own")
    (tmp_path / "real").chmod(0o700)
    needs_another_user()
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"link, above .* belongs to user nobody"):
        private.make_folder(tmp_path / "link" / "own")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        private.make_folder(tmp_path / "file")


def test_a_tree_is_made_private_and_searched_for_planted_files(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "jobs" / "one").chmod(0o755)
    (tmp_path / "elsewhere").symlink_to("/")
    private.check_tree(tmp_path, spared={"elsewhere"})
    assert mode(tmp_path / "jobs" / "one") == 0o700
    with pytest.raises(ConfigError, match="elsewhere is a link"):
        private.check_tree(tmp_path)
    (tmp_path / "elsewhere").unlink()
    (tmp_path / "jobs" / "one").chmod(0o777)
    with pytest.raises(ConfigError, match="jobs/one is writable for other users"):
        private.check_tree(tmp_path)


def test_files_of_programs_may_have_links_but_no_other_owner(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package").chmod(0o777)
    (tmp_path / "now").symlink_to("package")
    private.check_tree(tmp_path, by_programs=True)
    assert mode(tmp_path / "package") == 0o700
    needs_another_user()
    os.lchown(tmp_path / "now", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="now belongs to user nobody"):
        private.check_tree(tmp_path, by_programs=True)


def test_a_file_is_replaced_privately_without_following_links(tmp_path: Path) -> None:
    path, victim = tmp_path / "file", tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    private.replace(path, "new", lasting=True)
    assert (path.read_text(), mode(path), path.is_symlink()) == ("new", 0o600, False)
    (tmp_path / "file.new").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        private.replace(path, b"newer")
    assert victim.read_text() == "precious"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "file.new", "victim"]
