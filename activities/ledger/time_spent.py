"""Computes how the runs of jobs spent their time, by kind and by cause, from the ledger's rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, ScalarSelect, select

from activities.ledger.statements import gaps, intervals
from activities.ledger.tables import IncidentEvents, Incidents, Jobs
from everstep.decisions.training_time.ettr import QUIET, Ettr, Interval, ettr
from everstep.decisions.training_time.time_lost import Cause, IncidentTimes, time_lost


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The use of a period of a run's time."""

    ettr: Ettr
    causes: dict[Cause, float]
    """Cause → seconds; productive time is included."""


def ettr_of_run(
    connection: Connection, run: ScalarSelect[int], *, now_ns: int, window_s: float | None, quiet_since_ns: int | None
) -> Ettr | None:
    """Return the ETTR of a run; see ``Ledger.ettr``."""
    known = _Run.read(connection, run, now_ns=now_ns, quiet_since_ns=quiet_since_ns)
    return known.ettr(window_s) if known else None


def spent_of_run(
    connection: Connection,
    run: ScalarSelect[int],
    *,
    now_ns: int,
    since_ns: Sequence[int | None],
    quiet_since_ns: int | None,
    parked: Mapping[str, bool],
) -> list[TimeSpent] | None:
    """Return how a run spent its time; see ``Ledger.time_spent``."""
    known = _Run.read(connection, run, now_ns=now_ns, quiet_since_ns=quiet_since_ns)
    if known is None:
        return None
    times = _incident_times(connection, run, known.spans, parked)
    spent = []
    for begin_ns in since_ns:
        window_s = None if begin_ns is None else max(0, known.end_ns - begin_ns) / 1e9
        found = known.ettr(window_s)
        first_ns = known.end_ns - round(found.wall_s * 1e9)
        causes = time_lost(known.spans, times, begin_ns=first_ns, end_ns=known.end_ns)
        spent.append(TimeSpent(found, causes))
    return spent


@dataclass(frozen=True, slots=True)
class _Run:
    """The ledger's data about the time of a run."""

    start_ns: int
    end_ns: int
    spans: list[Interval]
    unknown: list[str]

    @classmethod
    def read(
        cls, connection: Connection, run: ScalarSelect[int], *, now_ns: int, quiet_since_ns: int | None
    ) -> _Run | None:
        """Return the data; None: there is no such run, or its start is not known."""
        found = connection.execute(select(Jobs.started_ns, Jobs.ended_ns, Jobs.outcome).where(Jobs.run == run)).first()
        if found is None or not found.started_ns:
            return None
        end_ns = now_ns if found.ended_ns is None else min(now_ns, found.ended_ns)
        spans = intervals(connection, run)
        if quiet_since_ns is not None and found.ended_ns is None:
            spans.append(Interval(quiet_since_ns, None, "recovery", QUIET))
        unknown = gaps(connection, run, finished=(found.outcome or "").startswith("finished"))
        return cls(found.started_ns, end_ns, spans, unknown)

    def ettr(self, window_s: float | None) -> Ettr:
        return ettr(self.spans, start_ns=self.start_ns, now_ns=self.end_ns, window_s=window_s, unknown=self.unknown)


def _incident_times(
    connection: Connection, run: ScalarSelect[int], spans: Sequence[Interval], parked: Mapping[str, bool]
) -> dict[str, IncidentTimes]:
    """Return the times of a run's incidents; notes are read only where the stages of a report are not enough."""
    parkings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in spans:
        if one.kind == "parked" and one.end_ns is not None:
            parkings[one.cause].append((one.start_ns, one.end_ns))
    going_on = {one.cause for one in spans if one.end_ns is None}
    rows = select(Incidents.number, Incidents.id, Incidents.opened_ns, Incidents.stages).where(Incidents.run == run)
    return {
        id: IncidentTimes(
            opened_ns,
            stages=tuple((name, seconds) for name, seconds in stages or ()),
            parked=tuple(parkings[id]),
            noted=_noted(connection, run, number) if not stages or id in going_on else (),
            parked_now=parked.get(id),
        )
        for number, id, opened_ns, stages in connection.execute(rows).all()
    }


def _noted(connection: Connection, run: ScalarSelect[int], number: int) -> tuple[tuple[str, int], ...]:
    """Return the stage and the time of each note of an incident, in order."""
    notes = select(IncidentEvents.stage, IncidentEvents.time_ns).where(
        IncidentEvents.run == run, IncidentEvents.number == number
    )
    return tuple((stage, time_ns) for stage, time_ns in connection.execute(notes.order_by(IncidentEvents.position)))
