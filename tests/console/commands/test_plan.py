"""``everstep plan`` says what a job needs, and where each number is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console import main
from console.commands.plan import size_of
from controlplane import measure
from everstep.errors import ConfigError

FITS = ["--state", "40GB", "--machines", "16", "--slots", "3", "--shm-gb", "1900"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main.run(["plan", *arguments, "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_the_table_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *FITS]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40.00 GB of state in each rank, 8 ranks on each of 16 machines, steps of 10 s"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == [
        "memory of a machine",
        "saves, of all ranks at once",
        "traffic of a machine",
        "restart after a rank died",
        "restart after a machine was lost",
        "computed from",
    ]
    assert any(line.split() == ["own", "slots", "960.40", "GB", "8", "x", "3", "slots"] for line in lines)
    assert any(line.split() == ["shm_gb", "1900", "given"] for line in lines)
    assert max(map(len, lines)) <= 140


def test_slots_that_do_not_fit_are_an_exit_code_and_what_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--state", "80GB"]) == 1

    shown = capsys.readouterr().out
    assert "does not fit: memory 2000.00 GB, /dev/shm 1000.00 GB" in shown
    assert "slots = 3, backup = false, and a larger /dev/shm" in shown
    assert main.run(["plan", "--state", "200GB"]) == 1
    assert "not even 2 slots without backups" in capsys.readouterr().out


def test_json_has_the_plan_and_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *FITS, "--hash-threads", "8")

    assert (found["state_bytes"], found["refusal"], found["checkpoint"]["slots"]) == (40 * 10**9, "", 3)
    assert found["memory"]["total"] == found["memory"]["own"] + found["memory"]["backups"]
    assert found["totals"]["restart"] == pytest.approx(sum(part["seconds"] for part in found["restart"]))
    assert (found["hardware"]["cards"], found["hash_threads"]) == (8, 8)
    assert found["sources"].keys() == found["hardware"].keys()


def test_backups_use_the_settings_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    usual, more = (planned(capsys, *FITS, *options) for options in ([], ["--transfer-connections", "32"]))

    assert usual["backups"]["bound_by"] == "transfer_connections"
    assert more["backups"]["bound_by"] == "backup_card_share"
    assert more["backups"]["rate"] == 0.25 * 8 * 50e9


def test_a_job_file_gives_the_settings_and_options_replace_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'script = "not-there.py"\nmachines = 2\nranks_per_machine = 4\n\n'
        "[checkpoint]\nslots = 3\nbackup_slots = 3\nstate_mb_per_rank = 1500\ndisk_every_steps = 7\n"
    )

    found = planned(capsys, str(job))
    assert (found["state_bytes"], found["machines"], found["ranks_per_machine"]) == (1_500_000_000, 2, 4)
    assert (found["memory"]["slots"], found["memory"]["backup_slots"]) == (3, 3)
    assert found["checkpoint"]["disk_every_steps"] == 7
    found = planned(capsys, str(job), "--slots", "2", "--no-backup", "--state", "2GB", "--machines", "3")
    assert (found["state_bytes"], found["machines"], found["ranks_per_machine"]) == (2 * 10**9, 3, 4)
    assert (found["memory"]["slots"], found["memory"]["backups"], found["backups"]) == (2, 0, None)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ([], "the size of a rank's state is not known: give --state"),
        (["--state", "40"], "--state '40' is not a size: give a number and a unit, e.g. 40GB"),
        (["--state", "0GB"], "--state '0GB': the state has at least one byte"),
        (["--state", "4GB", "--slots", "9"], "--slots 9: input should be less than or equal to 8"),
        (["--state", "4GB", "--hash-gb-s", "0"], "--hash-gb-s 0.0: input should be greater than 0"),
        (
            ["--state", "4GB", "--transfer-connections", "0"],
            "--transfer-connections 0: input should be greater than or equal to 1",
        ),
        (["nowhere.toml"], "there is no job file nowhere.toml: check the path"),
    ],
)
def test_wrong_options_say_what_and_what_to_do(
    arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", *arguments]) == 2
    assert wrong in capsys.readouterr().err


def test_a_job_file_without_a_size_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text('script = "train.py"\n')
    assert main.run(["plan", str(job)]) == 2
    assert "checkpoint.state_mb_per_rank" in capsys.readouterr().err


def test_measured_numbers_replace_defaults_and_options_replace_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "DISK_BYTES", 1 << 20)
    options = ["--state", "1MB", "--measure", "--disk-folder", str(tmp_path), "--hash-gb-s", "3"]
    found = planned(capsys, *options)

    assert found["hardware"]["hash_gb_s"] == 3
    assert (found["sources"]["hash_gb_s"], found["sources"]["copy_gb_s"]) == ("given", "measured here")
    assert found["sources"]["remote_gb_s"] == "assumed"
    assert main.run(["plan", "--state", "1MB", "--measure", "--disk-folder", str(tmp_path / "no")]) == 2
    assert "this computer cannot be measured" in capsys.readouterr().err


def test_without_the_cluster_there_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.delenv("EVERSTEP_INVENTORY", raising=False)
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    assert main.run(["plan", *FITS, "--cluster", "none"]) == 3
    assert "no cluster 'none' is up" in capsys.readouterr().err


def test_sizes_have_units() -> None:
    assert [size_of("--state", text) for text in ("40GB", "512 mb", "1.5GiB", "2TB")] == [
        *(40 * 10**9, 512 * 10**6, 3 << 29, 2 * 10**12)
    ]
    with pytest.raises(ConfigError):
        size_of("--state", "40 parsecs")
