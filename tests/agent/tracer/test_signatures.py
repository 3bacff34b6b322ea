"""Samples of ranks as messages: what is read is what was written, also after several machines were merged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tracer.signatures import message_of, ranks_in, runs_of, samples_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.hang.rank_samples import JobSamples, merged
from everstep.errors import AgentError
from everstep.model.topology import Topology
from tests.everstep.decisions.blame.hang.drawn import machines


@given(parts=machines())
def test_a_sample_is_read_as_it_was_written(parts: list[JobSamples]) -> None:
    for one in (*parts, merged(parts)):
        data = message_of(one).SerializeToString()
        assert samples_of(pb.SampleReply.FromString(data)) == one


@given(ranks=st.sets(st.integers(0, 1 << 20)).map(sorted))
def test_any_ranks_can_be_written_as_runs(ranks: list[int]) -> None:
    assert ranks_in(tuple(runs_of(ranks))) == tuple(ranks)


def test_a_group_of_a_mesh_takes_as_much_room_whatever_its_size() -> None:
    topology = Topology.of(1_200, 8, tp=8, pp=10)
    every = [runs_of(range(topology.world_size)), *(runs_of(topology.group(4_321, kind)) for kind in topology.kinds)]
    assert {len(runs) for runs in every} == {3}


@pytest.mark.parametrize(
    "reply",
    [
        pb.SampleReply(ranks=[pb.SampledRank(rank=0, trainer=1)]),
        pb.SampleReply(stacks=[pb.StackSignature(role="trainer", kind="of a later release")]),
        pb.SampleReply(stacks=[pb.StackSignature(role="trainer", kind="other", functions=["f"])]),
        pb.SampleReply(groups=[pb.ProcessGroup(name="0", runs=[0, 8])]),
    ],
    ids=["no such stack", "kind", "no file", "half a run"],
)
def test_what_cannot_be_read_is_refused(reply: pb.SampleReply) -> None:
    with pytest.raises(AgentError, match="another release"):
        samples_of(reply)
