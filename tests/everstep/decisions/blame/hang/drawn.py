"""Draws samples of ranks for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from everstep.decisions.blame.hang.rank_samples import (
    CommunicationRecord,
    JobSamples,
    PendingOperation,
    Position,
    ProcessSample,
    RankSample,
)
from everstep.decisions.blame.hang.stacks import Leaf, LeafKind, ProcessRole, Signature

names = st.text("abc_", min_size=1, max_size=4)
numbers = st.integers(-1, 1 << 40)
groups = st.sampled_from(["0", "1", "tp", "2"])
leaves = st.builds(Leaf, st.sampled_from(LeafKind), names, st.sampled_from(["", "next", "previous"]))
signatures = st.builds(
    Signature, st.sampled_from(ProcessRole), st.lists(st.tuples(names, names), max_size=3).map(tuple), leaves
)
operations = st.builds(
    PendingOperation,
    groups,
    numbers,
    names,
    st.sampled_from(["", "[[8]]"]),
    st.none() | st.integers(0, 9),
    st.booleans(),
)
records = st.builds(
    CommunicationRecord,
    st.dictionaries(groups, numbers, max_size=3),
    st.lists(operations, max_size=2).map(tuple),
    st.lists(st.tuples(st.integers(0, 1), numbers, st.booleans()), max_size=5).map(tuple),
    st.just(("0", "tp")),
)
processes = st.builds(
    ProcessSample,
    st.integers(1, 1 << 22),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    numbers,
    st.integers(0, 1 << 40),
    st.sampled_from(["", "S", "T"]),
    names,
)


@st.composite
def rank_samples(draw: st.DrawFn) -> RankSample:
    record = draw(st.none() | records)
    position = (draw(numbers), draw(numbers)) if record else None
    return RankSample(
        draw(st.none() | signatures),
        draw(st.lists(signatures, max_size=2).map(tuple)),
        record,
        is_stopped=draw(st.booleans()),
        blocked_in=draw(st.sampled_from(["", "sleep"])),
        sleeps=draw(st.booleans()),
        position=Position(draw(st.lists(st.integers(0, (1 << 64) - 1), max_size=2).map(tuple)), position),
        processes=draw(st.lists(processes, max_size=2).map(tuple)),
    )


def machines(most: int = 4) -> st.SearchStrategy[list[JobSamples]]:
    """Draw the samples of some machines. They may contradict each other."""
    members = st.sets(st.integers(0, 40), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    one = st.builds(
        JobSamples,
        st.dictionaries(st.integers(0, 7), rank_samples(), max_size=3),
        st.dictionaries(groups, members, max_size=3),
        st.dictionaries(groups, names, max_size=3),
        unread=st.lists(names, max_size=2).map(tuple),
    )
    return st.lists(one, max_size=most)
