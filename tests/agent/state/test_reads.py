"""Results that a thread hands to an event loop that may have ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent.launcher.processes import EndingWatch
from agent.state.reads import Reads


class EndingLoop(asyncio.SelectorEventLoop):
    """A loop that is closed right after another thread has seen that it is open."""

    def is_closed(self) -> bool:
        return super().is_closed() and threading.current_thread() is threading.main_thread()


class Notice:
    """The notice of a rank that ends once the test says so."""

    def __init__(self, ends: threading.Event) -> None:
        self.ends, self.dropped = ends, False

    def wait(self) -> bool:
        return self.ends.wait(10)


@pytest.mark.parametrize("part", ["read", "ending"])
def test_a_thread_that_is_done_after_the_agent_ended_is_no_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    goes_on = threading.Event()

    async def begin() -> None:
        if part == "ending":
            EndingWatch(Notice(goes_on), lambda: None)  # type: ignore[arg-type]
        else:
            with pytest.raises(TimeoutError):
                await Reads().do(lambda: goes_on.wait(10), timeout_s=0.01)

    before = set(threading.enumerate())
    loop = EndingLoop()
    loop.run_until_complete(begin())
    [thread] = [thread for thread in set(threading.enumerate()) - before if thread.name == part]
    loop.close()
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert errors == []
