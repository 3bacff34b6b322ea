"""What is the same as in the previous poll is left out of the answers, and nothing is lost by that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.pool.unchanged import digests, with_unchanged, without_unchanged
from everstep.model.machine import Machine
from everstep.model.pool import PollAnswers, RunningJob

MACHINES = [
    Machine(name=f"m{number}", address=f"10.0.0.{number}:7070", domain=f"rack-{number // 2}") for number in range(6)
]
some_machines = st.lists(st.sampled_from(MACHINES), unique_by=lambda machine: machine.name)
jobs = st.lists(
    st.builds(
        RunningJob,
        job=st.sampled_from(["gpt", "bert", "t5"]),
        run=st.sampled_from(["1", "2"]),
        machines=some_machines,
        settled=st.booleans(),
    ),
    unique_by=lambda job: job.job,
)
answers = st.builds(
    PollAnswers,
    machines=st.none() | some_machines,
    standbys=st.integers(0, 2),
    jobs=jobs,
    over=st.lists(st.just("gone"), max_size=1),
    faults=st.dictionaries(st.just("m1"), st.just("it does not answer")),
)


def in_order(found: PollAnswers) -> PollAnswers:
    """Return answers that can be compared: the order of jobs has no meaning."""
    return found.model_copy(update={"jobs": sorted(found.jobs, key=lambda job: job.job)})


@given(st.lists(answers, min_size=1, max_size=4))
def test_the_pool_has_the_complete_answers_of_each_poll(polls: list[PollAnswers]) -> None:
    known = PollAnswers()
    for complete in polls:
        known = with_unchanged(without_unchanged(complete, digests(known)), known)
        assert in_order(known) == in_order(complete)


@given(answers)
def test_what_did_not_change_is_not_sent_again(complete: PollAnswers) -> None:
    sent = without_unchanged(complete, digests(complete))
    assert (sent.machines, sent.jobs) == (None, [])
    assert (sent.standbys, sent.over, sent.faults) == (complete.standbys, complete.over, complete.faults)
