"""The time that a rank computes in a step, compared with its own past."""

from __future__ import annotations

from everstep.decisions.blame.slow.own_past import CpuPerStep
from everstep.decisions.detect.cpu_watch import KNOWN, CpuWatch


def test_times_are_for_each_step_and_slow_steps_do_not_change_the_typical_time() -> None:
    watch = CpuWatch()
    for look in range(KNOWN + 2):
        watch.observe(10 * look, 1.0 * look, 0.5 * look, step_s=0.2, slower=False)
    assert (watch.newest, watch.typical) == (CpuPerStep(0.1, 0.05, 0.2), CpuPerStep(0.1, 0.05))

    had = 1.0 * (KNOWN + 1)
    watch.observe(10 * (KNOWN + 2), had + 1.0, 0.5 * (KNOWN + 1) + 3.0, step_s=0.5, slower=True)
    assert watch.newest is not None and (round(watch.newest.waited_s, 6), round(watch.newest.busy_s, 6)) == (0.3, 0.4)
    assert watch.newest.step_s == 0.5
    assert watch.typical == CpuPerStep(0.1, 0.05)


def test_the_first_sample_of_a_process_has_no_result() -> None:
    watch = CpuWatch()
    watch.observe(10, 5.0, 0.0, step_s=0.2, slower=False)
    assert (watch.newest, watch.typical) == (None, None)
    watch.observe(10, 5.0, 0.0, step_s=0.2, slower=False)
    assert watch.newest is None, "there was no step between the samples"
    watch.begin()
    watch.observe(20, 0.1, 0.0, step_s=0.2, slower=False)
    assert watch.newest is None
    watch.observe(30, 0.2, 0.0, step_s=0.2, slower=False)
    assert watch.newest is not None and round(watch.newest.had_s, 6) == 0.01
