"""A script is compiled once for all ranks, and again after it changed."""

from __future__ import annotations

from pathlib import Path

from agent.launcher.fork_server import Scripts


def test_a_script_is_compiled_once_until_its_text_changes(tmp_path: Path) -> None:
    script, scripts = tmp_path / "train.py", Scripts()
    script.write_text("x = 1\n")
    first = scripts.compiled(str(script))
    assert first is not None
    assert scripts.compiled(str(script)) is first
    script.write_text("x = 2\n")  # the new text has the same size, and maybe the same modification time
    second = scripts.compiled(str(script))
    assert second is not None
    assert second is not first
    found: dict[str, int] = {}
    exec(second, found)
    assert found["x"] == 2


def test_a_broken_script_is_not_compiled_and_its_ranks_report_the_error(tmp_path: Path) -> None:
    script, scripts = tmp_path / "train.py", Scripts()
    for text in ("def broken(:\n", "assert (1, 'always true')\n", "nul \0 byte"):
        script.write_text(text)
        assert scripts.compiled(str(script)) is None
    assert scripts.compiled(str(tmp_path / "missing.py")) is None
