"""The list of the rules of detection. It has every rule once, and each anomaly names its rule."""

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


def test_thresholds_have_the_numbers_of_the_job() -> None:
    said = {rule.name: rule.threshold.format(policy=job().policy, checkpoint=job().checkpoint) for rule in RULES}

    assert said["hang"].startswith("10 median step times, at least 3 s, if samples show that all ranks wait for")
    assert "10 median step times, at least 5 s, if samples show nothing" in said["hang"]
    assert said["stale-checkpoint"] == "the newest save is over 100 steps and 60 s old"
    assert all(rule.finds for rule in RULES)
    assert (POLICY.hang.factor, CHECKPOINT.max_unsaved_steps) == (10, 100)


def test_an_anomaly_names_its_rule() -> None:
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


def test_a_job_that_trains_has_no_anomaly() -> None:
    assert list(anomalies(facts(ranks=[RANK, replace(RANK, rank=1)]))) == []
    assert list(anomalies(facts())) == []


def test_only_ends_of_ranks_count_in_an_earlier_generation() -> None:
    stale = replace(RANK, completed_steps=300, saved_step=100, saved_ns=1 * S, first_step_ns=1 * S)
    found = facts(seen(1, signal=9), ranks=[stale], quiet_s=900, newest=False)

    assert [anomaly.rule for anomaly in anomalies(found)] == ["failed-rank"]
