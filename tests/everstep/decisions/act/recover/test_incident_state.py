"""An incident's state is the same in the next run of its workflow, and its lists have limits."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.recover.incident_state import (
    FAILURES_KEPT,
    STAGES_KEPT,
    TRIED_KEPT,
    Continued,
    IncidentPage,
    IncidentState,
)
from everstep.decisions.act.versions.next_version import VersionChange
from everstep.model.eviction import EvictAnswer, Eviction
from everstep.model.finding import Finding, MachineFinding
from everstep.model.hang import HangConclusion, HangResult
from everstep.model.incident import Anomaly, Failure, Symptom
from everstep.model.job import JobSpec
from everstep.model.ladder import Rung, TriedRung
from everstep.model.launch import Launched, Showing
from everstep.model.machine import Machine
from everstep.model.ranks import Ranks
from everstep.model.slow import SlowResult
from everstep.model.stage import StageRecord
from everstep.model.state_copy import StateCopies
from everstep.model.version import JobVersion, VersionStatus

MACHINES = [Machine(name="m0", address="127.0.0.1:1")]
SPEC = JobSpec(name="gpt", script="/job.py", machines=1)
FAILURE = Failure(generation=1, step=3, symptom=Symptom.CRASH, cause="SIGKILL")
COPY = StateCopies.one(rank=0, machine="m0", completed_steps=3, valid=False, reason="damaged")
TRIED = TriedRung(rung=Rung.DIAGNOSE, symptom=Symptom.CRASH, generation=1)
XID = MachineFinding(machine="m0", finding=Finding(inspection="kernel-log", reason="xid-79", since_ns=5))
CHANGE = VersionChange(2, "it is new", suspect="the former one failed", asked=True)


def opened(**fields: Any) -> IncidentState:
    anomaly = Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="seen")
    known: dict[str, Any] = {"number": 2, "generation": 1, "resume_step": 0, "lineage": [(1, 0)], "anomaly": anomaly}
    return IncidentState(spec=SPEC, machines=MACHINES, **(known | fields))


def next_run(state: IncidentState) -> IncidentState:
    """Return the state as the next run of the workflow gets it."""
    state.shorten()
    return IncidentState.model_validate_json(state.model_dump_json())


# There is one strategy for each type of field. A field of a new type fails the test until a strategy for it is added.
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 99),
    "int | None": st.none() | st.integers(0, 99),
    float: st.floats(0, 1e9),
    str: st.text(max_size=5),
    "list[int]": st.lists(st.integers(0, 9), max_size=3),
    "list[str]": st.lists(st.text(max_size=3), max_size=3),
    "set[str]": st.sets(st.text(max_size=3), max_size=3),
    "set[int]": st.sets(st.integers(1, 2), max_size=2),
    "dict[str, str]": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    "dict[str, float]": st.dictionaries(st.text(max_size=3), st.floats(0, 1e9), max_size=2),
    "dict[str, list[int]]": st.dictionaries(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2), max_size=2),
    "list[tuple[int, int]]": st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9)), max_size=3),
    JobSpec: st.just(SPEC),
    "list[Machine]": st.just(MACHINES),
    Anomaly: st.just(opened().anomaly),
    Continued: st.sampled_from(Continued),
    Showing: st.just(Showing(kind="steps", silent=Ranks.of([1]))),
    "list[Failure]": st.lists(st.just(FAILURE), max_size=2),
    "list[StateCopies]": st.lists(st.just(COPY), max_size=2),
    "list[MachineFinding]": st.lists(st.just(XID), max_size=2),
    "list[TriedRung]": st.lists(st.just(TRIED), max_size=2),
    "set[Rung]": st.sets(st.sampled_from(Rung)),
    "dict[int, JobVersion]": st.just({n: JobVersion(number=n, status=VersionStatus.RUNNING) for n in (1, 2)}),
    "list[VersionChange]": st.lists(st.just(CHANGE), max_size=2),
    "Launched | None": st.none() | st.just(Launched(generation=2, resume_step=3, started_ns=4)),
    "HangResult | None": st.just(HangResult(conclusion=HangConclusion.NAMES, reason="m0", generation=1)),
    "SlowResult | None": st.just(SlowResult(conclusion="names", reason="m0", generation=1)),
    "list[EvictAnswer]": st.lists(st.just(EvictAnswer(rule="xid", machine="m0", yes=True, why="x")), max_size=2),
    "list[Eviction]": st.lists(st.just(Eviction(machine="m0", rule="xid", reason="xid-79", why="x")), max_size=2),
    "list[StageRecord]": st.lists(st.just(StageRecord(name="stop", seconds=1.0, found="x")), max_size=2),
}


def filled(model: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for instances of a model with a value in each field."""
    return st.builds(model, **{name: _of(field.annotation) for name, field in model.model_fields.items()})


def _of(kind: Any) -> st.SearchStrategy[Any]:
    name = str(kind).replace("typing.", "")
    for known, strategy in OF_TYPE.items():
        if kind is known or (isinstance(known, str) and _short(name) == known):
            return strategy
    return filled(kind)


def _short(name: str) -> str:
    """Return a type's name without modules: ``list[everstep.model.incident.Failure]`` → ``list[Failure]``."""
    return re.sub(r"[\w.]+\.(\w+)", r"\1", name)


@given(filled(IncidentState))
def test_any_state_is_the_same_in_the_next_run(state: IncidentState) -> None:
    before = state.model_copy(deep=True)
    assert next_run(state) == before


def test_lists_that_only_grow_are_bounded_and_keep_their_first_and_last_entries() -> None:
    many = 3 * STAGES_KEPT
    state = opened(
        failures=[FAILURE.model_copy(update={"generation": n}) for n in range(many)],
        page=IncidentPage(stages=[StageRecord(name=str(n), seconds=0.0, found="") for n in range(many)]),
    )
    state.ladder.all_tried = [TRIED.model_copy(update={"generation": n}) for n in range(many)]
    later = next_run(next_run(state))

    assert [one.generation for one in later.failures][:: FAILURES_KEPT - 1] == [0, many - 1]
    assert len(later.page.stages) == STAGES_KEPT
    assert (later.page.stages[0].name, later.page.stages[-1].name) == ("0", str(many - 1))
    assert [one.generation for one in later.ladder.all_tried] == list(range(many - TRIED_KEPT, many))


def test_attempts_that_were_reset_do_not_return_in_the_next_run() -> None:
    state = opened(failed_restores=2)
    state.ladder.remembered = [TRIED]
    assert (next_run(state).ladder.remembered, next_run(state).failed_restores) == ([TRIED], 2)
    state.begin_again()
    assert (next_run(state).ladder.remembered, next_run(state).failed_restores) == ([], 0)
