"""``everstep notices test`` sends to real receivers, and shows their answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from console import main
from tests.activities.notices.http_receiver import says, serving


def test_each_receiver_is_told_once_and_what_came_back_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER", "Bearer never-shown")
    file = tmp_path / "notices.toml"
    with serving() as server:
        file.write_text(
            f"""
            [[receiver]]
            name = "pager"
            kinds = ["parked"]
            url = "{server.url}"
            headers_from = {{Authorization = "PAGER"}}

            [[receiver]]
            name = "mail"
            command = ["sh", "-c", "cat > {tmp_path}/got; echo sent"]
            """
        )
        assert main.run(["notices", "test", str(file)]) == 0
        shown = capsys.readouterr().out
        assert sorted(shown.splitlines()) == ["mail: accepted: exit code 0: sent", "pager: accepted: HTTP 202 Accepted"]
        [body] = server.bodies
        assert (body["kind"], server.headers[0]["authorization"]) == ("test", "Bearer never-shown")
        assert body["id"] in (tmp_path / "got").read_text()

        server.answer = says(500, "who is Bearer never-shown?")
        assert main.run(["notices", "test", str(file), "--only", "pager"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("pager: not accepted: HTTP 500 Internal Server Error")
    assert "never-shown" not in shown


def test_a_file_that_is_wrong_is_refused_before_anybody_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notices.toml"
    file.write_text(f'[[receiver]]\nname = "a"\ncommand = ["touch", "{tmp_path}/told"]\n[[receiver]]\nname = "b"\n')
    assert main.run(["notices", "test", str(file)]) == 2
    assert "receiver b: give it one of command, url and url_from" in capsys.readouterr().err
    assert not (tmp_path / "told").exists()

    assert main.run(["notices", "test", str(tmp_path / "none")]) == 2
    assert "there is no file with the receivers of notices" in capsys.readouterr().err


def test_a_receiver_that_is_not_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notices.toml"
    file.write_text('[[receiver]]\nname = "a"\ncommand = ["true"]\n')
    assert main.run(["notices", "test", str(file), "--only", "b"]) == 2
    assert "has no receiver 'b'" in capsys.readouterr().err
