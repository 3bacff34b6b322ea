"""The list of rules: each is there once, says what it is, and is told from the others."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from everstep.decisions import detect
from everstep.decisions.detect.job_facts import Rule
from everstep.decisions.detect.rules import RULES, anomalies
from everstep.model.incident import Symptom
from tests.everstep.decisions.detect.job_facts import CHECKPOINT, POLICY, RANK, S, facts, job, seen


def test_every_rule_of_the_folder_is_in_the_list() -> None:
    names = [f"{detect.__name__}.{found.name}" for found in pkgutil.iter_modules(detect.__path__)]
    modules = [importlib.import_module(name) for name in names]
    rules = {rule.name for module in modules for rule in vars(module).values() if isinstance(rule, Rule)}

    assert rules == {rule.name for rule in RULES}
    assert len(rules) == len(RULES)


def test_every_rule_says_its_threshold_with_the_numbers_of_the_job() -> None:
    said = {rule.name: rule.threshold.format(policy=job().policy, checkpoint=job().checkpoint) for rule in RULES}

    assert said["hang"].startswith("10 median step times, at least 3 s, where samples show that all wait for some")
    assert "10, at least 5 s, where they do not" in said["hang"]
    assert said["stale-checkpoint"] == "the newest save is over 100 steps and 60 s old"
    assert all(rule.finds for rule in RULES)
    assert (POLICY.hang.factor, CHECKPOINT.max_unsaved_steps) == (10, 100)


def test_an_anomaly_says_which_rule_found_it() -> None:
    stale = replace(RANK, rank=1, completed_steps=300, saved_step=100, saved_ns=1 * S, first_step_ns=1 * S)
    found = facts(seen(0, signal=9), ranks=[stale], lost={"m1": [1]}, quiet_s=900)

    named = [(anomaly.rule, anomaly.symptom) for anomaly in anomalies(found)]
    assert named == [
        ("failed-rank", Symptom.CRASH),
        ("lost-machine", Symptom.CRASH),
        ("hang", Symptom.HANG),
        ("stale-checkpoint", Symptom.UNSAVED),
    ]
    assert [anomaly.rule for anomaly in anomalies(facts(seen(0, code=0), now_s=900))] == ["early-exit"]


def test_a_job_that_trains_well_is_left_alone() -> None:
    assert list(anomalies(facts(ranks=[RANK, replace(RANK, rank=1)]))) == []
    assert list(anomalies(facts())) == []


def test_of_an_earlier_generation_only_ends_of_ranks_count() -> None:
    stale = replace(RANK, completed_steps=300, saved_step=100, saved_ns=1 * S, first_step_ns=1 * S)
    found = facts(seen(1, signal=9), ranks=[stale], quiet_s=900, newest=False)

    assert [anomaly.rule for anomaly in anomalies(found)] == ["failed-rank"]
