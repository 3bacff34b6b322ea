"""Words and fields that a later release added are read and kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from activities.agents.held_copies import held_of
from activities.payloads import DATA_CONVERTER
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_restore import choose_restore
from everstep.decisions.keep.copies_text import copies_text
from everstep.decisions.training_time.ettr import Interval, ettr
from everstep.model.evidence import Evidence
from everstep.model.incident import Anomaly, IncidentReport, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Assignment, Machine
from everstep.model.message import Words
from everstep.model.state_copy import StateCopies, Tier
from everstep.model.topology import Topology


@given(st.text(max_size=30), st.sampled_from([Symptom, Tier]))
def test_any_text_is_a_word_and_does_not_change(text: str, words: type[Words]) -> None:
    word = words(text)

    assert word == text == str(word) == word.value
    assert word.known == (text in list(words))
    assert words(text) == word
    assert hash(words(text)) == hash(word)
    assert copy.deepcopy(word) == pickle.loads(pickle.dumps(word)) == word
    if not word.known:
        assert word not in list(words)


def test_a_number_is_no_word() -> None:
    with pytest.raises(ValueError, match="7 is not a valid Symptom"):
        Symptom(cast("str", 7))


LATER: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Anomaly, {"id": "m1-1", "generation": 1, "symptom": "slow", "headline": "h", "suspects": ["m3"]}),
    (Evidence, {"generation": 1, "held": [{"places": "m0\t0", "completed_steps": 4, "tier": "tape"}], "x": 1}),
    (
        JobState,
        {
            "spec": {"name": "gpt", "script": "/x.py", "later_env": {"A": "B"}, "policy": {"evict_after": 3}},
            "machines": [{"name": "m0", "address": "a:1", "rack": "r7"}],
            "status": "replaying",
            "pending": [{"id": "m1-1", "generation": 1, "symptom": "slow", "headline": "h"}],
            "incidents": [{"id": "i", "number": 1, "headline": "h", "stage": "replay", "resolution": "rolled back"}],
            "evicted": ["m9"],
        },
    ),
    (
        IncidentReport,
        {
            "headline": "h",
            "resolution": "rolled back",
            "cause": "slow",
            "step": 3,
            "lost_steps": 1,
            "evicted": ["m9"],
            "stages": [],
            "generation": 2,
            "recovered": True,
            "seconds": 1.0,
            "failures": [{"generation": 1, "step": 3, "symptom": "slow", "cause": "slow", "hint": "x"}],
        },
    ),
]


@pytest.mark.parametrize(("model", "later"), LATER, ids=[model.__name__ for model, _ in LATER])
async def test_an_earlier_release_passes_a_later_releases_message_on_unchanged(
    model: type[BaseModel], later: dict[str, Any]
) -> None:
    """A workflow decodes the message, and writes it into the input of its next run."""
    [payload] = await DATA_CONVERTER.encode([later])
    [found] = await DATA_CONVERTER.decode([payload], [model])
    [carried] = await DATA_CONVERTER.encode([found])
    [again] = await DATA_CONVERTER.decode([carried])

    def within(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return all(key in whole and within(value, whole[key]) for key, value in part.items())
        if isinstance(part, list):
            return all(within(one, other) for one, other in zip(part, whole, strict=True))
        return bool(part == whole)

    assert within(later, again)


def test_a_copy_in_an_unknown_tier_is_mentioned_but_not_used() -> None:
    told = pb.HeldCheckpoint(rank=0, completed_steps=9, valid=True)
    told.MergeFromString(pb.HeldCheckpoint.DESCRIPTOR.fields_by_name["tier"].number.__lshift__(3).to_bytes(1) + b"\x07")
    own = StateCopies.one(rank=0, machine="m0", completed_steps=4)
    held, _ = held_of({"m0": [told]})
    of_a_later_worker = StateCopies.one(rank=0, machine="m0", completed_steps=8, tier=Tier("tape"))
    topology = Topology.of(machines=1, ranks_per_machine=1, tp=1, pp=1)

    chosen = choose_restore([own, *held, of_a_later_worker], Assignment(topology, ["m0"]))

    assert (held[0].tier, held[0].valid) == ("tier 7", False)
    assert chosen.step == 4
    assert "newer" in chosen.reason
    assert "tape of m0" in copies_text([StateCopies.one(rank=0, completed_steps=8, tier=Tier("tape"), machine="m0")])


def test_time_of_an_unknown_kind_is_not_productive() -> None:
    kind: Any = "rollback"

    found = ettr([Interval(0, 4, kind)], start_ns=0, now_ns=10)

    assert found.ratio == 0.6


def test_messages_of_a_later_release_are_compared_with_their_unknown_fields() -> None:
    spec = {"name": "gpt", "script": "/x.py"}

    assert JobSpec.model_validate(spec | {"new": 1}) != JobSpec.model_validate(spec)
    assert Machine.model_validate({"name": "m", "address": "a", "new": 1}) == Machine.model_validate(
        {"name": "m", "address": "a", "new": 1}
    )
