"""Search attributes: the Web UI lists and filters workflows by them.

An attribute that is not registered makes a workflow task fail for ever, and the server terminates a workflow with an
attribute of more than 2,048 bytes. So every write uses :func:`search_attributes`, which cuts long values.
"""

from __future__ import annotations

from typing import Any

from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

from everstep.model.job_state import JobState
from workflows.web_ui import pending_text

JOB_NAME = SearchAttributeKey.for_keyword("JobName")
STAGE = SearchAttributeKey.for_keyword("Stage")
SYMPTOM = SearchAttributeKey.for_keyword("Symptom")
VERDICT = SearchAttributeKey.for_keyword("Verdict")
SEVERITY = SearchAttributeKey.for_keyword("Severity")
EVICTED = SearchAttributeKey.for_keyword_list("Evicted")
LOST_STEPS = SearchAttributeKey.for_int("LostSteps")
CODE_VERSION = SearchAttributeKey.for_keyword("CodeVersion")
"""The version of the job's running code, e.g. ``v2``."""
PENDING_UPDATE = SearchAttributeKey.for_keyword("PendingUpdate")
"""The versions that wait for a restart of the job, and how long each waits at most; empty: there are none."""
ETTR = SearchAttributeKey.for_float("Ettr")
"""The share of time in which the job trained, 0 to 1 (ByteRobust, section 4.2)."""
ETTR_LAST_HOUR = SearchAttributeKey.for_float("EttrLastHour")

ALL: tuple[SearchAttributeKey[Any], ...] = (
    *(JOB_NAME, STAGE, SYMPTOM, VERDICT, SEVERITY, EVICTED, LOST_STEPS),
    *(CODE_VERSION, PENDING_UPDATE, ETTR, ETTR_LAST_HOUR),
)

KEYWORD_CHARACTERS = 200
"""The largest number of characters of a keyword."""
LIST_BYTES = 1800
"""The largest size of a list of keywords, bytes."""


def cut_keyword(value: str) -> str:
    """Return a keyword, cut to its limit with a visible mark."""
    return value if len(value) <= KEYWORD_CHARACTERS else value[: KEYWORD_CHARACTERS - 2] + " …"


def cut_list(values: list[str]) -> list[str]:
    """Return a keyword list within its limit, with the number of omitted values: ``["m1", "m2", "+973 more"]``."""
    kept: list[str] = []
    size = 0
    for i, value in enumerate(map(cut_keyword, values)):
        size += len(value.encode()) + 3
        if size > LIST_BYTES:
            return [*kept, f"+{len(values) - i} more"]
        kept.append(value)
    return kept


def of_job(state: JobState) -> dict[SearchAttributeKey[Any], Any]:
    """Return the attributes of a job; values that are not known yet are left out."""
    values: dict[SearchAttributeKey[Any], Any] = {JOB_NAME: state.spec.name, STAGE: state.status_text}
    shares = {ETTR: state.ettr, ETTR_LAST_HOUR: state.ettr_last_hour}
    values |= {key: share for key, share in shares.items() if share is not None}
    if len(state.versions) > 1:
        values |= {CODE_VERSION: f"v{state.spec.version}", PENDING_UPDATE: pending_text(state.versions)}
    return values


def search_attributes(values: dict[SearchAttributeKey[Any], Any]) -> TypedSearchAttributes:
    """Return attributes for a start, each cut to its limit."""
    return TypedSearchAttributes([SearchAttributePair(key, _cut(value)) for key, value in values.items()])


def updates(values: dict[SearchAttributeKey[Any], Any]) -> list[Any]:
    """Return attributes for an upsert, each cut to its limit."""
    return [key.value_set(_cut(value)) for key, value in values.items()]


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return cut_keyword(value)
    if isinstance(value, list):
        return cut_list(value)
    return value
