"""Faults that are injected from outside the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drills.faults.fault import inject
from drills.faults.hangs import Spin
from everstep.errors import CannotInject


async def test_a_fault_that_nothing_injects_is_refused_and_no_agent_is_killed_for_it() -> None:
    let_go: list[bool] = []
    planned = SimpleNamespace(let_go=lambda: let_go.append(True))
    context: Any = SimpleNamespace(request=SimpleNamespace(fault=Spin()), planned=planned)

    with pytest.raises(CannotInject, match="spin: it is not injected from outside"):
        await inject(context)
    assert let_go, "ranks that waited for the fault may continue"
