"""An agent may forget an observation only when the workflow or the ledger has it."""

from __future__ import annotations

import asyncio

from activities.watching.acknowledgements import Acknowledgements
from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb

S = 10**9


def test_what_an_agent_said_is_dealt_with_once_the_workflow_took_the_report() -> None:
    known = Acknowledgements()
    for sequence, generation in ((7, 1), (9, 2)):
        end = pb.RankEnd(rank=0, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=S))
        known.ended("m0", pb.Observation(sequence=sequence, generation=generation, rank_ended=end))
    name = "gpt"
    assert known.handled("m0", name) == 0
    known.reported.add(1)
    assert (known.handled("m0", name), known.handled("m1", name)) == (7, 0)
    known.reported.add(2)
    assert known.handled("m0", name) == 9
    assert known.handled("m0", OF_NO_JOB) == 0


async def test_what_happened_to_a_machine_is_dealt_with_once_it_is_written_down() -> None:
    known, loop = Acknowledgements(), asyncio.get_running_loop()
    name, written = "gpt", {}
    for sequence, whose in ((3, ""), (5, name), (6, "")):
        written[sequence] = loop.create_future()
        known.noted("m0", pb.Observation(sequence=sequence, job=whose), written[sequence])
    end = pb.RankEnd(rank=0, exit=pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=S))
    known.ended("m0", pb.Observation(sequence=7, generation=1, rank_ended=end))
    known.reported.add(1)
    assert (known.handled("m0", name), known.handled("m0", OF_NO_JOB)) == (4, 0), (
        "observations 5 and 3 are not in the ledger yet"
    )
    written[6].set_result(None)
    assert known.handled("m0", OF_NO_JOB) == 2
    written[3].set_result(None)
    assert known.handled("m0", OF_NO_JOB) == 6
    known.acknowledged("m0", OF_NO_JOB, 6)
    assert known.handled("m0", OF_NO_JOB) == 0, (
        "observation 6 was acknowledged, so there is nothing more to acknowledge"
    )
    written[5].set_result(None)
    assert known.handled("m0", name) == 7


async def test_an_agent_that_lost_its_log_counts_anew() -> None:
    """The log of a new agent begins with observation 1 again."""
    known, loop = Acknowledgements(), asyncio.get_running_loop()
    written = [loop.create_future() for _ in range(2)]
    known.noted("m0", pb.Observation(sequence=500), written[0])
    known.noted("m0", pb.Observation(sequence=1), written[1])
    written[0].set_result(None)
    assert known.handled("m0", OF_NO_JOB) == 0
    written[1].set_result(None)
    assert known.handled("m0", OF_NO_JOB) == 1
