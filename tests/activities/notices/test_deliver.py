"""Notices reach real programs and servers; errors are reported without secrets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.notices.deliver import deliver
from activities.notices.settings import Receiver
from everstep.errors import NoticeError
from everstep.model.notice import Notice, NoticeKind
from everstep.system.procfs import process_of
from tests.activities.notices.http_receiver import HOST, HttpReceiver, certificates, drips, says, serving

NOTICE = Notice(
    kind=NoticeKind.PARKED, id="parked/incident/gpt/0001/1", text="job gpt is parked: why", time_ns=10**18, job="gpt"
)
TOKEN = "Bearer zq81-never-shown"


@pytest.fixture
def server() -> Iterator[HttpReceiver]:
    with serving() as found:
        yield found


def program(tmp_path: Path, text: str, **more: float) -> Receiver:
    path = tmp_path / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return Receiver.model_validate({"name": "mail", "command": [str(path), "a b"]} | more)


async def test_a_program_gets_the_notice_and_its_last_line_is_the_answer(tmp_path: Path) -> None:
    said = await deliver(program(tmp_path, f'cat > {tmp_path}/got; echo one; echo "sent to $1"'), NOTICE)

    assert said == "exit code 0: sent to a b"
    assert json.loads((tmp_path / "got").read_text()) == json.loads(NOTICE.body())


async def test_a_program_need_not_read_nor_say_anything(tmp_path: Path) -> None:
    long = NOTICE.model_copy(update={"machines": ["m" * 100] * 5000})

    assert await deliver(program(tmp_path, "exit 0"), long) == "exit code 0"


async def test_a_program_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(NoticeError, match=r"^exit code 3: no route to the pager$"):
        await deliver(program(tmp_path, "echo no route to the pager >&2; exit 3"), NOTICE)
    with pytest.raises(NoticeError, match=r"^signal 9$"):
        await deliver(program(tmp_path, "kill -9 $$"), NOTICE)


async def test_a_program_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(NoticeError, match=r"tell did not end within 0.5 s"):
        await deliver(program(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait", deadline_s=0.5), NOTICE)
    pid = int((tmp_path / "pid").read_text())
    while (found := process_of(pid)) is not None and found.lives:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)


async def test_what_a_program_leaves_running_holds_up_nothing(tmp_path: Path) -> None:
    said = await deliver(program(tmp_path, "sleep 600 & echo $!", deadline_s=60), NOTICE)
    os.kill(int(said.removeprefix("exit code 0: ")), signal.SIGKILL)


async def test_a_program_that_writes_much_is_not_held_up(tmp_path: Path) -> None:
    said = await deliver(program(tmp_path, "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo sent"), NOTICE)

    assert said == "exit code 0: sent"


async def test_a_program_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoticeError, match="cannot be run: No such file"):
        await deliver(Receiver(name="mail", command=[str(tmp_path / "gone")]), NOTICE)


async def test_a_post_has_the_notice_and_headers_from_variables(server: HttpReceiver) -> None:
    receiver = Receiver(name="pager", url=f"{server.url}?key=1", headers_from={"Authorization": "T"})

    assert await deliver(receiver, NOTICE, {"T": f" {TOKEN}\n"}) == "HTTP 202 Accepted"
    assert server.bodies == [json.loads(NOTICE.body())]
    assert server.paths == ["/hook?key=1"]
    [headers] = server.headers
    assert headers["authorization"] == TOKEN
    assert headers["idempotency-key"] == NOTICE.id
    assert headers["content-type"].startswith("application/json")


async def test_an_address_may_be_a_secret(server: HttpReceiver) -> None:
    receiver = Receiver(name="pager", url_from="HOOK")
    await deliver(receiver, NOTICE, {"HOOK": server.url})
    with pytest.raises(NoticeError, match="the variable HOOK is not set where this worker was started"):
        await deliver(receiver, NOTICE, {})

    assert len(server.bodies) == 1


async def test_a_server_that_does_not_take_it_is_said_without_what_is_secret(server: HttpReceiver) -> None:
    server.answer = says(403, f"who is {TOKEN}?\n")
    receiver = Receiver(name="pager", url=server.url, headers_from={"Authorization": "T"})
    with pytest.raises(NoticeError, match=r"^HTTP 403 Forbidden: who is ") as refused:
        await deliver(receiver, NOTICE, {"T": TOKEN})

    assert "zq81" not in str(refused.value)


async def test_long_answers_are_cut(server: HttpReceiver) -> None:
    server.answer = says(500, "x" * 100_000)
    with pytest.raises(NoticeError) as refused:
        await deliver(Receiver(name="pager", url=server.url), NOTICE)

    assert len(str(refused.value)) < 300


async def test_no_redirect_is_followed(server: HttpReceiver) -> None:
    with serving() as other:
        server.answer = says(307, Location=other.url)
        with pytest.raises(NoticeError, match=rf"HTTP 307 .*: it redirects to {HOST}:\d+: use the final URL"):
            await deliver(Receiver(name="pager", url=server.url), NOTICE)

    assert other.bodies == []


async def test_a_redirect_to_an_address_that_cannot_be_read(server: HttpReceiver) -> None:
    server.answer = says(307, Location="http://[x")
    with pytest.raises(NoticeError, match=r"HTTP 307 .*: it redirects: use the final URL"):
        await deliver(Receiver(name="pager", url=server.url), NOTICE)


async def test_a_server_that_answers_slowly_without_an_end_is_given_up(server: HttpReceiver) -> None:
    server.answer = drips
    with pytest.raises(NoticeError, match=rf"{HOST}:\d+ did not answer within 0.5 s"):
        await deliver(Receiver(name="pager", url=server.url, deadline_s=0.5), NOTICE)


async def test_nobody_at_the_address() -> None:
    with serving() as server:
        pass
    with pytest.raises(NoticeError, match=rf"{HOST}:\d+ cannot be reached: Connection refused"):
        await deliver(Receiver(name="pager", url=server.url), NOTICE)


async def test_a_certificate_is_verified(tmp_path: Path) -> None:
    keys = certificates(tmp_path / "keys")
    with serving(keys=keys) as server:
        trusted = Receiver(name="pager", url=server.url, ca_file=keys.authority)
        assert await deliver(trusted, NOTICE) == "HTTP 202 Accepted"
        with pytest.raises(NoticeError, match=r"certificate of .* is not valid: .*; if .* set ca_file"):
            await deliver(Receiver(name="pager", url=server.url), NOTICE)
    other = certificates(tmp_path / "other", "127.0.0.99")
    with serving(keys=other) as stranger, pytest.raises(NoticeError, match=r"is not valid: .*IP address mismatch"):
        await deliver(Receiver(name="pager", url=stranger.url, ca_file=other.authority), NOTICE)

    assert stranger.bodies == []
    assert len(server.bodies) == 1


async def test_no_proxy_is_used(server: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:9")

    assert await deliver(Receiver(name="pager", url=server.url), NOTICE) == "HTTP 202 Accepted"
