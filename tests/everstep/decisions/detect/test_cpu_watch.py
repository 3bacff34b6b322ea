"""How long a rank computes in a step, against its own past."""

from __future__ import annotations

from everstep.decisions.detect.cpu_watch import KNOWN, CpuPerStep, CpuWatch


def test_it_is_counted_for_each_step_and_what_is_slower_does_not_become_the_past() -> None:
    watch = CpuWatch()
    for look in range(KNOWN + 2):
        watch.observe(10 * look, 1.0 * look, 0.5 * look, step_s=0.2, slower=False)
    assert (watch.newest, watch.typical) == (CpuPerStep(0.1, 0.05, 0.2), CpuPerStep(0.1, 0.05))

    had = 1.0 * (KNOWN + 1)
    watch.observe(10 * (KNOWN + 2), had + 1.0, 0.5 * (KNOWN + 1) + 3.0, step_s=0.5, slower=True)
    assert watch.newest is not None and (round(watch.newest.waited_s, 6), round(watch.newest.busy_s, 6)) == (0.3, 0.4)
    assert watch.newest.step_s == 0.5, "of the same steps"
    assert watch.typical == CpuPerStep(0.1, 0.05)


def test_before_there_is_a_past_nothing_is_known_and_another_process_counts_from_its_own_beginning() -> None:
    watch = CpuWatch()
    watch.observe(10, 5.0, 0.0, step_s=0.2, slower=False)
    assert (watch.newest, watch.typical) == (None, None)
    watch.observe(10, 5.0, 0.0, step_s=0.2, slower=False)
    assert watch.newest is None, "no step since"
    watch.begin()
    watch.observe(20, 0.1, 0.0, step_s=0.2, slower=False)
    assert watch.newest is None
    watch.observe(30, 0.2, 0.0, step_s=0.2, slower=False)
    assert watch.newest is not None and round(watch.newest.had_s, 6) == 0.01
