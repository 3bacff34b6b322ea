"""A file of failures is read, and its errors are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.failure_file import read_failures
from everstep.decisions.pool.demand import MachineFailure
from everstep.errors import ConfigError

CLUSTER = '{"machines": 4, "from": 86400, "until": 864000}'


def test_times_count_from_the_begin_of_the_record(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text(
        f'{CLUSTER}\n\n{{"machine": "m1", "failed": 172800, "repaired": 259200}}\n{{"machine": "m2", "failed": 86400}}'
    )
    record = read_failures(file)
    assert (record.machines, record.days) == (4, 9.0)
    assert record.failures == (MachineFailure("m1", 1.0, 2.0), MachineFailure("m2", 0.0, None))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty: the first line is"),
        ("{", "f.jsonl:1: Invalid JSON"),
        ("[1]", "f.jsonl:1:"),
        ('{"machines": 0, "from": 0, "until": 1}', "f.jsonl:1: machines: "),
        ('{"machines": 4, "from": 5, "until": 5}', "f.jsonl:1: 'until' 5 is not after 'from' 5"),
        (f'{CLUSTER}\n{{"machine": "m1"}}', "f.jsonl:2: failed: Field required"),
        (f'{CLUSTER}\n{{"machine": "m1", "failed": "x"}}', "f.jsonl:2: failed: "),
        (f'{CLUSTER}\n{{"machine": "m1", "failed": 1}}', "f.jsonl:2: 'failed' 1 is not between 'from' 86400"),
        (
            f'{CLUSTER}\n{{"machine": "m1", "failed": 90000, "repaired": 1}}',
            "f.jsonl:2: 'repaired' 1 is before",
        ),
        (f'{CLUSTER}\n{{"machine": "m1", "failed": 90000, "kind": "x"}}', "f.jsonl:2: kind: "),
    ],
)
def test_an_error_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as found:
        read_failures(file)
    assert words in str(found.value)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, words in (("none", "there is no file"), (".", "is a folder"), ("bytes", "not UTF-8 text (byte 0)")):
        with pytest.raises(ConfigError) as found:
            read_failures(tmp_path / name)
        assert words in str(found.value)
