"""A thread that moves much data lets other threads run first."""

from __future__ import annotations

import os
import threading

import pytest

from everstep.system.bulk_threads import yield_the_core


def test_only_the_calling_thread_yields() -> None:
    found: list[int] = []

    def work() -> None:
        yield_the_core()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_where_it_is_forbidden_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    yield_the_core()
