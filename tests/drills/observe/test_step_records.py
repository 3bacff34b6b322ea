"""Step records of a machine that is off: in the agent's files, and in reports that were not drained."""

from __future__ import annotations

from pathlib import Path

from agent.reporting.step_archive import StepArchive
from drills.observe.step_records import Records, ReportedStep, rescue
from everstep.rank.step_reports import ReportFile


def test_what_a_dead_machine_had_recorded_is_kept(tmp_path: Path) -> None:
    state, shm = tmp_path / "state", tmp_path / "shm"
    folder = state / "jobs" / "job"
    folder.mkdir(parents=True)
    (shm / "job").mkdir(parents=True)
    assert rescue("job", state, shm).of == {}
    archive = StepArchive(folder)
    for generation, steps in ((1, (0, 1, 2)), (2, (2, 3))):
        report = ReportFile.create(shm / "job" / f"report-5-{generation}", rank=5, generation=generation)
        for step in steps:
            report.report(step, step / 2, 0.0, 0)
        if generation == 1:
            archive.drain(report)  # the agent had drained only this report
    (shm / "job" / "report-5-3.new").write_bytes(b"")
    found = rescue("job", state, shm)
    assert [(one.step, one.generation) for one in found.of[5]] == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2)]
    assert found.redone() == 1
    # The rescue wrote the records to the machine's disk. If the disk is not lost, the agent reports them itself.
    assert [one.step for reply in StepArchive(folder).read(5, 0) for one in reply.records] == [0, 1, 2, 2, 3]

    both = Records()
    both.join(found)
    both.join(found)
    assert len(both.of[5]) == 10 and len(found.of[5]) == 5


def test_generations_of_a_rank_that_step_at_the_same_time_are_named() -> None:
    def step(generation: int, time_ns: int) -> ReportedStep:
        return ReportedStep(time_ns, generation, time_ns, b"")

    one_after_the_other = [step(1, 1), step(1, 2), step(2, 3), step(4, 5)]
    assert Records({0: one_after_the_other, 1: []}).overlaps() == []
    stranded = [*one_after_the_other, step(2, 6)]
    found = ["rank 3 made a step in generation 2 after its first step in generation 4"]
    assert Records({3: stranded}).overlaps() == found


def test_the_newest_report_of_a_step_is_that_of_the_last_generation_wherever_it_comes_from() -> None:
    """If a machine has left the job, its agent is asked last."""
    last, left = ReportedStep(7, 2, 20, b"right"), ReportedStep(7, 1, 10, b"wrong")
    assert Records({0: [last, left]}).newest().of == {0: [last]}
