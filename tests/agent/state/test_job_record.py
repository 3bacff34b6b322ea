"""Which version of the job's code a generation ran."""

from __future__ import annotations

from agent.state.job_record import JobRecord


def test_a_generation_runs_the_version_of_its_launch_and_repeated_launches_add_nothing() -> None:
    record = JobRecord(job="gpt", boot="b")
    for generation, version in [(1, 1), (2, 1), (2, 1), (4, 3), (5, 1), (5, 1), (6, 1)]:
        record.launched(generation, "", version)

    assert [record.version_of(generation) for generation in range(8)] == [0, 1, 1, 1, 3, 1, 1, 1]
    assert record.versions == [(1, 1), (4, 3), (5, 1)]
    again = JobRecord.model_validate_json(record.model_dump_json())
    assert again == record
