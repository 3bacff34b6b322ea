"""The ratio that ``status`` and ``attach`` show. It comes from the ledger, and from agents while no rank steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from activities.ledger.ledger import Ledger
from console.views.follower import Follower
from controlplane.client import Control
from controlplane.progress import JobProgress, RankView
from controlplane.queries.status import ettr_of
from controlplane.queries.time_lost import lost_of
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState

S = 10**9
SPEC = JobSpec(name="gpt", script="/train.py", machines=1)


class ControlOfALedger(Control):
    """A control plane that has only a ledger."""

    def __init__(self, ledger: Ledger | None) -> None:
        self._only = ledger

    async def ledger(self) -> Ledger | None:
        return self._only


@pytest.fixture
def began_ns() -> int:
    return time.time_ns() - 100 * S


@pytest.fixture
def control(tmp_path: Path, began_ns: int) -> ControlOfALedger:
    """A control plane with the ledger of a job that was started 100 s ago and has stepped since then."""
    ledger = Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.job_started(SPEC, started_ns=began_ns)
    ledger.generation_launched("gpt", 1, resume_step=0, launched_ns=began_ns)
    ledger.generation_stepped("gpt", 1, stepped_ns=began_ns)
    return ControlOfALedger(ledger)


def stepped(ago_s: float) -> JobProgress:
    """The progress of a rank whose last step was ``ago_s`` seconds ago, and whose steps take 0.1 s."""
    now_ns = time.time_ns()
    given: dict[str, Any] = {"rank": 0, "machine": "m0", "generation": 1, "pid": 1, "alive": True, "attached": True}
    given |= {"finished": False, "completed_steps": 9, "optimizer_steps": 9, "loss": 1.0, "tokens": 0}
    view = RankView(**given, stepped_ns=now_ns - round(ago_s * S), step_s=0.1)
    return JobProgress(now_ns, {0: view})


async def test_the_time_in_which_no_rank_steps_is_not_productive(control: ControlOfALedger) -> None:
    for progress, ratio, last_minute in ((None, 1.0, 1.0), (stepped(0.1), 1.0, 1.0), (stepped(30.0), 0.7, 0.5)):
        whole, window = await ettr_of(control, "gpt", progress), await ettr_of(control, "gpt", progress, 60.0)
        assert whole and whole.ratio == pytest.approx(ratio, abs=0.05)
        assert window and window.ratio == pytest.approx(last_minute, abs=0.08)
    assert await ettr_of(ControlOfALedger(None), "gpt") is None


async def test_who_follows_a_job_sees_it_fall(control: ControlOfALedger, began_ns: int) -> None:
    follower = Follower(control, JobState(spec=SPEC, machines=[], started_ns=began_ns), None, attached=True)  # type: ignore[arg-type]
    await follower._ask_ledger(stepped(0.1))
    assert follower._ettr == pytest.approx(1.0, abs=0.01)
    await follower._ask_ledger(stepped(50.0))
    assert follower._ettr == pytest.approx(0.5, abs=0.05)


async def test_status_says_what_the_time_was_lost_to(control: ControlOfALedger, began_ns: int) -> None:
    state = JobState(spec=SPEC, machines=[], started_ns=began_ns)
    found = await lost_of(control, state, stepped(30.0), running=True)
    assert found and found.lost.since_start["detect"] == pytest.approx(30.0, abs=5.0)
    assert found.lost.last_hour == pytest.approx(found.lost.since_start, abs=0.1)
    assert found.ettr_last_hour and found.ettr_last_hour.ratio == pytest.approx(0.7, abs=0.05)

    ended = await lost_of(control, state, stepped(0.1), running=False)
    assert ended and (ended.lost.last_hour, ended.ettr_last_hour) == (None, None)
    assert await lost_of(ControlOfALedger(None), state, stepped(0.1), running=True) is None
    other = state.model_copy(update={"spec": JobSpec(name="moe", script="/train.py")})
    assert await lost_of(control, other, stepped(0.1), running=True) is None
