"""Job files: correct settings are read, and all wrong settings are reported in one error."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from controlplane.job_file.checks import env_warnings
from controlplane.job_file.job_file import load_job
from everstep.errors import ConfigError
from everstep.model.job import JobSpec

GOOD = 'script = "train.py"\nmachines = 4\nranks_per_machine = 2\ntp = 2\npp = 2\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def job_file(folder: Path, text: str, name: str = "gpt-small.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def told(path: Path | None, overrides: dict[str, Any] | None = None, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides, environment or {})
    return str(caught.value)


def test_a_file_is_read(folder: Path) -> None:
    text = (
        GOOD
        + 'args = ["--steps", "300"]\norder = "dp-pp-tp"\nenv = {OMP_NUM_THREADS = "1"}\n'
        + "[policy.retry]\nmax_attempts = 7\n"
    )
    spec = load_job(job_file(folder, text), environment={})
    assert (spec.name, spec.script, spec.args) == ("gpt-small", str(folder / "train.py"), ["--steps", "300"])
    assert (spec.topology().dp, spec.order) == (2, ("dp", "pp", "tp"))
    assert (spec.env, spec.policy.retry.max_attempts) == ({"OMP_NUM_THREADS": "1"}, 7)


MESH = 'script = "train.py"\nmachines = 4\nranks_per_machine = 2\n'


def test_a_mesh_keeps_the_order_of_its_axes(folder: Path) -> None:
    text = MESH + 'mesh = {pp = 2, dp_shard = -1, tp = 2}\n[groups.ep]\nsize = 4\nover = ["dp_shard", "tp"]\n'
    spec = load_job(job_file(folder, text), environment={})

    assert str(spec.topology()) == "4,2,pp=2,dp_shard=2,tp=2,ep=4:dp_shard+tp"
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec, (
        "a history keeps the job as JSON, so it must read back unchanged"
    )
    environment = {"EVERSTEP_JOB_MESH": "tp=4,dp=2", "EVERSTEP_JOB_GROUPS": "ep=2:dp"}
    assert str(load_job(job_file(folder, text), {}, environment).topology()) == "4,2,tp=4,dp=2,ep=2:dp"
    options = {"mesh": "dp_replicate=2,dp_shard=4", "groups": ["ep=2:dp_shard"]}
    assert str(load_job(job_file(folder, text), options, {}).topology()).endswith(
        "dp_replicate=2,dp_shard=4,ep=2:dp_shard"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mesh = {dp = 3}", "4 machines x 2 ranks = 8 ranks cannot be split into dp 3 (job.toml)"),
        ("mesh = {dp = 8}\ntp = 2", "mesh replaces tp, pp and order"),
        ("mesh = {dp = 2.5}", "mesh = {'dp': 2.5} in job.toml: the size of dp is 2.5; it must be a whole number"),
        ("mesh = 3", "mesh = 3 in job.toml: expected axes with sizes, e.g. {pp = 2, dp = -1}"),
        ('mesh = "dp"', "mesh = 'dp' in job.toml: 'dp' is not a mesh: write it as pp=2,dp_shard=-1,tp=2"),
        ('mesh = ["dp"]', "expected axes with sizes"),
        ('mesh = [["dp"]]', "expected a value: the list is too short"),
        ("groups = 3", "groups = 3 in job.toml: expected groups"),
        ("groups = {ep = 3}", 'ep is not a group: write it as ep = { size = 4, over = ["dp_shard", "tp"] }'),
        ('groups = {ep = {size = 3, over = ["dp"]}}', "ep 3 cannot be laid over dp: the 8 ranks there cannot be split"),
        (
            'groups = {ep = {size = "x", over = ["dp"]}}',
            "'ep=x:dp' is not a laid group",
        ),
    ],
)
def test_a_wrong_mesh_is_named(folder: Path, line: str, expected: str) -> None:
    assert expected in told(job_file(folder, f"{MESH}{line}\n", "job.toml"))


def test_option_before_environment_before_file(folder: Path) -> None:
    path = job_file(folder, GOOD + "[policy.retry]\nmax_attempts = 7\nbackoff_factor = 3\n")
    environment = {
        "EVERSTEP_JOB_TP": "4",
        "EVERSTEP_JOB_PP": "1",
        "EVERSTEP_JOB_ARGS": "--text 'a b'",
        "EVERSTEP_JOB_POLICY_RETRY_MAX_ATTEMPTS": "8",
        "EVERSTEP_JOB": "not ours",
    }
    spec = load_job(path, {"tp": 1, "name": None, "policy": {"retry": {"max_attempts": None}}}, environment)
    assert (spec.tp, spec.pp, spec.machines, spec.name) == (1, 1, 4, "gpt-small")
    assert (spec.args, spec.policy.retry.max_attempts, spec.policy.retry.backoff_factor) == (["--text", "a b"], 8, 3.0)


def test_the_table_checkpoint_is_read_from_all_sources(folder: Path) -> None:
    text = GOOD + '[checkpoint]\nslots = 4\ndisk_path = "disk"\nremote_url = "s3://bucket/runs"\n'
    environment = {
        "EVERSTEP_JOB_CHECKPOINT_SLOTS": "5",
        "EVERSTEP_JOB_CHECKPOINT_OVERLAP": "false",
        "EVERSTEP_JOB_CHECKPOINT_BACKUP_RATE_MB_S": "250",
    }

    policy = load_job(job_file(folder, text), {"checkpoint": {"disk_keep": 7}}, environment).checkpoint

    assert (policy.slots, policy.overlap, policy.backup_rate_mb_s, policy.disk_keep) == (5, False, 250.0, 7)
    assert (policy.disk_path, policy.remote_url) == (str(folder / "disk"), "s3://bucket/runs")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            'disk = false\nremote_url = "s3://bucket/runs"',
            "checkpoint.remote_url = 's3://bucket/runs' in job.toml: copies for remote storage are made from disk",
        ),
        ("backup_rate_mb_s = inf", "checkpoint.backup_rate_mb_s = inf in job.toml: expected a finite number"),
        (
            "disk_every_min = 0",
            "checkpoint.disk_every_min = 0 in job.toml: no checkpoint would ever be written",
        ),
        ('remote_url = "gcss://bucket"', "there is no protocol gcss: did you mean gcs://?"),
        ('remote_url = "nonsense-of-mine://x"', "use a URL such as s3://bucket/runs or file:///mnt/runs"),
    ],
)
def test_what_does_not_fit_together_is_told(folder: Path, lines: str, expected: str) -> None:
    assert expected in told(job_file(folder, f"{GOOD}[checkpoint]\n{lines}\n", "job.toml"))


@pytest.mark.parametrize(
    "lines",
    [
        "disk = false\ndisk_every_min = 0",
        "disk_every_min = 0\ndisk_every_steps = 10",
        'remote_url = "simplecache::s3://b"',
    ],
)
def test_what_fits_together_is_taken(folder: Path, lines: str) -> None:
    load_job(job_file(folder, f"{GOOD}[checkpoint]\n{lines}\n"), environment={})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('evict.mode = "shdow"', "policy.evict.mode = 'shdow' in job.toml: expected one of act, approve, shadow, off"),
        ("evict.mode = 5", "policy.evict.mode = 5 in job.toml: "),
        ('evict.rules = { gone-machin = "off" }', "gone-machin is not a rule that evicts: did you mean gone-machine?"),
        (
            'evict.rules = { unknown-verdict = "act" }',
            "unknown-verdict is not a rule that evicts: there are sure",
        ),
        ('evict.rules = { gone-machine = "on" }', "gone-machine: expected one of act, approve, shadow, off"),
        (
            'ladder.modes = { reattempt = "off" }',
            "reattempt is not a rung whose mode can be set: there are diagnose, rollback",
        ),
        ('ladder.modes = { diagnose = "on" }', "diagnose: expected one of act, approve, shadow, off"),
        ('diagnose.off = ["bitwize"]', "bitwize is not a test: did you mean bitwise?"),
        ("diagnose.settings = { bits = { seconds = 5 } }", "bits is not a test: did you mean bitwise?"),
    ],
)
def test_a_rule_mode_rung_or_test_that_nobody_knows_is_told(folder: Path, lines: str, expected: str) -> None:
    assert expected in told(job_file(folder, f"{GOOD}[policy]\n{lines}\n", "job.toml"))


def test_modes_of_eviction_are_read_from_file_and_environment(folder: Path) -> None:
    text = GOOD + '[policy.evict.rules]\ngone-machine = "shadow"\n'

    policy = load_job(job_file(folder, text), environment={"EVERSTEP_JOB_POLICY_EVICT_MODE": "approve"}).policy

    assert (policy.evict.mode, policy.evict.rules) == ("approve", {"gone-machine": "shadow"})


def test_a_remote_folder_without_a_protocol_is_a_path(folder: Path) -> None:
    spec = load_job(job_file(folder, GOOD + '[checkpoint]\nremote_url = "remote"\n'), environment={})

    assert spec.checkpoint.remote_url == str(folder / "remote")


def test_paths_follow_where_they_were_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in a file is relative to the file, and a path in an option to the current folder."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.py").touch()
    monkeypatch.chdir(elsewhere)
    path = job_file(folder, GOOD + 'cwd = "elsewhere"\n')
    assert load_job(path, environment={}).script == str(folder / "train.py")
    assert load_job(path, environment={}).cwd == str(elsewhere)
    assert load_job(path, {"script": Path("other.py")}, {}).script == str(elsewhere / "other.py")


def test_names_without_a_name(folder: Path) -> None:
    """A job without a name is named after its script."""
    script = folder / "My Long Training_Script v2 of the year.py"
    script.touch()
    names = {load_job(None, {"script": str(script)}, {}).name for _ in range(5)}
    assert all(name.startswith("my-long-training-script-v") and len(name) <= 30 for name in names)
    assert len(names) > 1
    assert load_job(job_file(folder, GOOD, "Größe 7.toml"), environment={}).name == "gr-e-7"


def test_everything_wrong_is_told_at_once(folder: Path) -> None:
    message = told(
        job_file(
            folder,
            'name = "Bad Name"\nscript = "trian.py"\nmachnes = 4\nstall_factor = 3\nargs = ["--steps", 300]\n'
            "env = {A = 1}\ncheckpoint_slots = 9\ndisk_keep = 9\ntp = 3\nmachines = 4\n"
            "[checkpoint]\nslots = 99\noverlp = false\nmax_attempts = 2\nbackup = 1\n"
            "[policy]\nmax_atempts = 3\nmachines = 2\nretry.backoff_factor = 0.5\n"
            'stall_floor_s = 9\nstorage_tries = 9\n[policy.hang]\nfloor_s = "x"\nidle_flor_s = 1\nround_s = 2\n'
            "[policy.nan]\nnan_loss_steps = 2\n",
        )
    )
    lines = message.splitlines()
    assert lines[0] == f"the job file {folder}/gpt-small.toml has {len(lines) - 1} problems:"
    for expected in (
        "unknown key 'machnes' in gpt-small.toml: did you mean 'machines'?",
        "unknown key 'stall_factor' in gpt-small.toml: it is now called 'policy.hang.factor'",
        "unknown key 'policy.max_atempts' in gpt-small.toml: did you mean 'policy.retry.max_attempts'?",
        "unknown key 'policy.machines' in gpt-small.toml: move it to the top of the file, above [policy]",
        "unknown key 'policy.stall_floor_s' in gpt-small.toml: it is now called 'policy.hang.floor_s'",
        "unknown key 'policy.storage_tries' in gpt-small.toml: move it under [policy.storage] as 'tries'",
        "unknown key 'policy.hang.idle_flor_s' in gpt-small.toml: did you mean 'policy.hang.idle_floor_s'?",
        "unknown key 'policy.hang.round_s' in gpt-small.toml: move it under [policy.slow]",
        "unknown key 'policy.nan.nan_loss_steps' in gpt-small.toml: did you mean 'policy.nan.loss_steps'?",
        f"script in gpt-small.toml: there is no file {folder}/trian.py; did you mean train.py?",
        "name = 'Bad Name' in gpt-small.toml: 'Bad Name' is not a job name: "
        "use up to 30 of a-z, 0-9 and '-', e.g. 'gpt-small'",
        "args[1] = 300 in gpt-small.toml: expected text: put it in quotes",
        "env.A = 1 in gpt-small.toml: expected text: put it in quotes",
        "unknown key 'checkpoint_slots' in gpt-small.toml: move it under [checkpoint] as 'slots'",
        "unknown key 'disk_keep' in gpt-small.toml: move it under [checkpoint]",
        "checkpoint.slots = 99 in gpt-small.toml: expected at most 8",
        "unknown key 'checkpoint.overlp' in gpt-small.toml: did you mean 'checkpoint.overlap'?",
        "unknown key 'checkpoint.max_attempts' in gpt-small.toml: move it under [policy.retry]",
        "checkpoint.backup = 1 in gpt-small.toml: expected true or false",
        "policy.retry.backoff_factor = 0.5 in gpt-small.toml: expected at least 1.0",
        "policy.hang.floor_s = 'x' in gpt-small.toml: expected a number",
        "4 machines x 1 ranks = 4 ranks cannot be split into tp 3 x pp 1: 4 is not a multiple of 3 (gpt-small.toml)",
    ):
        assert f"  - {expected}" in lines
    assert len(lines) == 23


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('machines = "4"', "machines = '4' in job.toml: expected a whole number"),
        ("machines = 2.5", "machines = 2.5 in job.toml: expected a whole number"),
        ("machines = true", "machines = True in job.toml: expected a whole number"),
        ("machines = 0", "machines = 0 in job.toml: expected at least 1"),
        ("machines = 2024-01-01", "machines = datetime.date(2024, 1, 1) in job.toml: expected a whole number"),
        ("name = 3", "name = 3 in job.toml: expected text: put it in quotes"),
        ('args = "--steps 3"', "args = '--steps 3' in job.toml: expected a list"),
        ("env = 3", "env = 3 in job.toml: expected a table"),
        ("policy = 3", "policy = 3 in job.toml: expected a table"),
        ("checkpoint = true", "checkpoint = True in job.toml: expected a table"),
        ('order = "pp-dp"', "order is pp-dp; it must name tp, pp and dp once each"),
        ('order = "xx-dp-tp"', "order is xx-dp-tp; it must name tp, pp and dp once each (job.toml)"),
        (
            'store_ports = "29510-29500"',
            "store_ports = '29510-29500' in job.toml: '29510-29500' is not a range of ports",
        ),
        ("store_ports = 29500", "store_ports = 29500 in job.toml: expected text: put it in quotes"),
        ('python = "/no/such/python"', "/no/such/python is not a program"),
        ('cwd = "train.py"', "there is no folder"),
        ("tp = 2", "1 machines x 1 ranks = 1 ranks cannot be split into tp 2"),
    ],
)
def test_a_wrong_value_is_named(folder: Path, line: str, expected: str) -> None:
    message = told(job_file(folder, f'script = "train.py"\n{line}\n', "job.toml"))
    assert expected in message
    assert message.startswith(f"the job file {folder}/job.toml has a problem:\n  - ")


def test_options_and_environment_are_named_too(folder: Path) -> None:
    environment = {"EVERSTEP_JOB_TP": "many", "EVERSTEP_JOB_TPP": "1"}
    message = told(job_file(folder, GOOD), {"ranks_per_machine": 0}, environment)
    assert "tp = 'many' from EVERSTEP_JOB_TP: expected a whole number" in message
    assert "unknown key 'tpp' from EVERSTEP_JOB_TPP: did you mean 'tp'?" in message
    assert "ranks_per_machine = 0 from option --ranks-per-machine: expected at least 1" in message


def test_a_script_is_looked_at(folder: Path) -> None:
    assert "script is missing" in told(None)
    assert "is a folder" in told(None, {"script": str(folder)})
    assert "there is no file" in told(None, {"script": str(folder / "nowhere" / "x.py")})
    broken = folder / "broken.py"
    broken.write_text("import os\ndef f(:\n  pass\n")
    message = told(None, {"script": str(broken)})
    assert f"{broken}, line 2, is not Python: invalid syntax\n      def f(:\n" in message
    broken.write_bytes(b"\x7fELF\x00\x01\xff")
    assert "is not Python" in told(None, {"script": str(broken)})
    broken.write_text("x = '\\d'\nimport not_installed_here\n")
    assert load_job(None, {"script": str(broken)}, {}).script == str(broken)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"script = ", "is not TOML: Invalid value (at end of document)"),
        (b"import torch\n", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
    ],
)
def test_a_file_that_is_no_job_file(folder: Path, content: bytes, expected: str) -> None:
    path = folder / "job.toml"
    path.write_bytes(content)
    assert expected in told(path)


def test_no_file_and_a_folder(folder: Path) -> None:
    assert "there is no job file" in told(folder / "none.toml")
    assert "is a folder" in told(folder)


def test_the_example_in_the_docs_is_a_job_file(folder: Path) -> None:
    import controlplane.job_file.job_file

    example = (controlplane.job_file.job_file.__doc__ or "").split("::\n", 1)[1]
    text = "\n".join(line.strip() for line in example.splitlines())
    spec, written = load_job(job_file(folder, text), environment={}), tomllib.loads(text)
    assert spec.policy.retry.max_attempts == written["policy"]["retry"]["max_attempts"]
    assert spec.checkpoint.disk_every_min == written["checkpoint"]["disk_every_min"]


def test_variables_of_the_machines_are_only_named(folder: Path) -> None:
    spec = load_job(job_file(folder, GOOD + 'env_from = ["HF_TOKEN"]\nenv_file = "secrets.env"\n'), environment={})
    assert (spec.env_from, spec.env_file) == (["HF_TOKEN"], str(folder / "secrets.env"))
    assert env_warnings(spec) == []
    message = told(job_file(folder, GOOD + 'env_from = ["HF TOKEN"]\n'))
    assert "'HF TOKEN' is not a variable" in message
    assert "not a variable" in told(job_file(folder, GOOD + 'env_from = ["EVERSTEP_AGENT_TOKEN_FILE"]\n'))
    message = told(job_file(folder, GOOD + 'env = {HF_TOKEN = "hf_abc"}\nenv_from = ["HF_TOKEN"]\n'))
    assert "HF_TOKEN is also in env" in message
    assert "hf_abc" not in message


def test_secrets_in_env_are_warned_of_and_never_shown(folder: Path) -> None:
    text = 'env = {HF_TOKEN = "hf_abc", OMP_NUM_THREADS = "1", TOKENIZERS_PARALLELISM = "false"}\n'
    [warning] = env_warnings(load_job(job_file(folder, GOOD + text), environment={}))
    assert warning.startswith("HF_TOKEN in env is stored unencrypted in Temporal's history")
    assert "env_from" in warning and "hf_abc" not in warning
    assert env_warnings(load_job(job_file(folder, GOOD + text + "redact = []\n"), environment={})) == []
    message = told(job_file(folder, GOOD + "env = {HF_TOKEN = 12345}\n"))
    assert "env.HF_TOKEN" in message and "12345" not in message
