"""Plans of soaks: equal seeds give equal plans, faults meet in every way, and only faults that can fire are drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drills.checks import check
from drills.faults.all import FAULTS, fault_named
from drills.faults.not_finite import MachineBitflip
from drills.spec.request import DrillRequest
from everstep.errors import ConfigError, EverstepError
from soaks.choose import chosen
from soaks.draw import draw, left_out, meetings, soaked
from soaks.plan import GAP, Sizes, SoakPlan

THREE = {"machines": 3, "ranks_per_machine": 1, "tp": 1, "pp": 1}
SMALL = Sizes(machines=4, ranks_per_machine=1, tp=2, pp=1)


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([Sizes(), SMALL]))
@settings(max_examples=40)
def test_a_plan_has_the_requested_number_of_valid_faults(seed: int, faults: int, sizes: Sizes) -> None:
    plan = draw(seed, faults, sizes)
    assert plan == draw(seed, faults, sizes)
    assert faults <= plan.faults <= faults + 1
    assert [one.number for one in plan.episodes] == list(range(1, len(plan.episodes) + 1))
    plan.check()
    for index, episode in enumerate(plan.episodes):
        for position in range(len(episode.faults)):
            request = plan.request(index, position)
            last = max(request.at_step, request.strike_hold or 0)
            assert plan.gate(index) < last < plan.gate(index + 1) == plan.gate(index) + GAP


def test_every_kind_of_fault_is_drawn_or_left_out_with_a_reason() -> None:
    drawn = {kind.name for kind in soaked()}
    assert drawn | left_out().keys() == {fault.name for fault in FAULTS}
    assert not drawn & left_out().keys() and all(left_out().values())
    assert {kind for _, kinds in meetings() for kind in kinds} == drawn


def test_five_seeds_draw_every_meeting_and_every_kind_often() -> None:
    plans = [draw(seed, 300) for seed in (91, 264, 287, 90, 9)]
    counts = Counter(kind for plan in plans for episode in plan.episodes for kind in episode.kinds)
    assert min(counts[kind.name] for kind in soaked()) >= 10
    met = {(episode.how, episode.kinds) for plan in plans for episode in plan.episodes}
    assert met == set(meetings())


def test_faults_of_devices_have_their_own_jobs_on_machines_with_the_device() -> None:
    settings_of = {
        kind: episode.setting for episode in draw(1, 300).episodes for kind in episode.kinds if episode.own_job
    }
    assert settings_of.keys() == {fault.name for fault in soaked() if fault.own_job}
    assert {kind for kind, setting in settings_of.items() if setting == "network"} == {
        "nic-down",
        "nic-flap",
        "switch-down",
        "cut-link",
    }


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    plan = draw(5, 40)
    plan.write(tmp_path / "plan.json")
    assert SoakPlan.read(tmp_path / "plan.json") == plan
    some = plan.only({2, 7})
    assert [one.number for one in some.episodes] == [2, 7]
    assert some.request(1, 0).at_step == plan.request(1, 0).at_step, (
        "the step of a fault follows from the episode's number in the soak"
    )
    assert some.request(1, 0).fault.name == plan.episodes[6].faults[0].name


@given(st.integers(0, 1000), st.sampled_from([(2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 2, 2), (3, 1, 1, 1), (8, 1, 2, 2)]))
@settings(max_examples=20)
def test_a_job_of_any_size_has_a_plan(seed: int, size: tuple[int, int, int, int]) -> None:
    machines, ranks_per_machine, tp, pp = size
    plan = draw(seed, 30, Sizes(machines=machines, ranks_per_machine=ranks_per_machine, tp=tp, pp=pp))
    assert plan.faults >= 30
    assert all(fault_named(kind).least_machines <= machines for episode in plan.episodes for kind in episode.kinds)
    plan.check()


def test_each_rung_of_the_ladder_finds_some_of_the_flipped_bits() -> None:
    """Tests find some of the flipped bits, after a NaN or after a crash. A replay finds the others."""
    shown = {
        (fault.finite, fault.only_in_job)
        for episode in draw(2, 300, only=["bitflip"]).episodes
        for fault in episode.faults
        if isinstance(fault, MachineBitflip)
    }
    assert shown == {(False, False), (True, False), (False, True)}


def test_a_plan_is_checked_without_checking_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = draw(1, 120)
    assert {"network", "own jobs"} <= {episode.setting for episode in plan.episodes}

    def asked(*_: object, **__: object) -> str:
        raise AssertionError("it was asked")

    monkeypatch.setattr("drills.checks.network.missing", asked)
    monkeypatch.setattr("drills.faults.full.mounts.why_not", asked)
    plan.check()
    with pytest.raises(AssertionError, match="asked"):
        check(DrillRequest(fault=next(f for one in plan.episodes for f in one.faults if f.needs_network)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"faults": [{"fault": "kil-rank"}]}, "no fault is called 'kil-rank': did you mean 'kill-rank'"),
        ({"faults": [{"fault": "kill-rank", "ranks": [99]}]}, "episode 1: --rank 99 does not exist"),
        ({"faults": [{"fault": "kill-machine", "machine": "m9"}]}, "episode 1: --machine m9 does not exist"),
        ({"number": 2, "faults": [{"fault": "raise"}]}, "episode 2 twice"),
        ({"how": "within", "faults": [{"fault": "raise"}, {"fault": "kill-machine"}]}, "within needs a stage"),
    ],
)
def test_an_invalid_plan_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    second = {"number": 2, "faults": [{"fault": "kill-rank"}]}
    (tmp_path / "plan.json").write_text(json.dumps({"seed": 1, "episodes": [{"number": 1} | changes, second]}))
    with pytest.raises(ConfigError, match=said):
        choose(tmp_path, plan=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the plan of a soak"),
        ('{"seed": 1, "episodes": []}', "at least 1"),
        (
            '{"seed": 1, "episodes": [{"number": 1, "how": "within", "faults": [{"fault": "spin"}]}]}',
            "does not fit 1",
        ),
        (
            '{"seed": 1, "sizes": {"tp": 3}, "episodes": [{"number": 1, "faults": [{"fault": "spin"}]}]}',
            "cannot be split",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        SoakPlan.read(tmp_path / "plan.json")


def choose(tmp_path: Path, **given: object) -> tuple[SoakPlan, Path]:
    base: dict[str, object] = {
        "faults": 3,
        "seed": 1,
        "only": [],
        "sizes": Sizes().model_dump(),
        "plan": None,
        "resume": None,
        "folder": tmp_path / "soak",
    }
    return chosen(**(base | given))  # type: ignore[arg-type]


def test_valid_options_give_a_plan_and_invalid_options_are_refused(tmp_path: Path) -> None:
    plan, folder = choose(tmp_path)
    assert (plan, folder) == (draw(1, 3), tmp_path / "soak")
    only, _ = choose(tmp_path, only=["kill-rank", "kill-machine"])
    assert {kind for one in only.episodes for kind in one.kinds} <= {"kill-rank", "kill-machine"}
    for given_, said in (
        ({"only": ["kill-rnk"]}, "did you mean 'kill-rank'"),
        ({"only": ["slow-machine"]}, "no soak draws it: takes two minutes"),
        ({"sizes": {"machines": 3, "ranks_per_machine": 1, "tp": 2, "pp": 1}}, "cannot be split"),
        ({"only": ["kill-worker"]}, "add one with --only"),
        ({"only": ["bitflip"], "sizes": THREE}, "the job has 3 machines, and needs 4"),
        ({"sizes": {"machines": 1, "ranks_per_machine": 4, "tp": 2, "pp": 2}}, "two machines or more"),
        ({"resume": tmp_path / "nowhere"}, "not the folder of a soak"),
        ({"plan": tmp_path / "nowhere"}, "cannot be read"),
    ):
        with pytest.raises(EverstepError, match=said):
            choose(tmp_path, **given_)
    folder.mkdir()
    plan.write(folder / "plan.json")
    assert choose(tmp_path, resume=folder, seed=99) == (plan, folder)
    with pytest.raises(ConfigError, match="resume it with --resume"):
        choose(tmp_path)
