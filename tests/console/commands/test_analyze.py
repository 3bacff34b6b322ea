"""``everstep analyze`` reads files and gives a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console import main
from tests.everstep.decisions.blame.hang.test_recorded import unpacked
from tests.everstep.decisions.blame.slow.test_by_timings import times
from tests.everstep.dumps.test_nccl_ras import communicator, process, report
from tests.everstep.dumps.test_py_spy import TEXT


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.run(["analyze", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, culprit = unpacked("loader", tmp_path)
    sizes = ("--ranks-per-machine", "2", "--tp", "2", "--pp", "2", "--hosts", "a,b,c,d")

    code, shown, _ = run(capsys, str(folder), *sizes)

    assert code == 0
    lines = shown.splitlines()
    assert lines[0].startswith(f"names: rank {culprit} on b: 7 ranks wait for it")
    assert "  evict     b" in lines
    assert any(line.strip().startswith("stage 0") and "[" in line for line in lines)

    code, shown, _ = run(capsys, "hang", str(folder), *sizes, "--json")
    found = json.loads(shown)
    assert (code, found["ranks"], found["machines"], found["names"]) == (0, [culprit], [1], ["b"])
    assert list(found) == [
        *("conclusion", "method", "reason", "ranks", "machines", "names", "innocent", "group", "alternatives"),
        *("unexplained", "unknown", "unread", "evidence", "stacks", "topology"),
    ]


def test_the_papers_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = unpacked("loader", tmp_path)
    mesh = ("--ranks-per-machine", "2", "--mesh", "pp=2,dp=-1,tp=2")
    code, shown, _ = run(capsys, str(folder), *mesh, "--stacks-only", "--json")
    found = json.loads(shown)
    assert (code, found["conclusion"], found["machines"]) == (0, "over-evicts", [1, 3])
    assert found["group"]["kind"] == "pp"


def test_records_of_torch_need_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, culprit = unpacked("flight-records-16", tmp_path)
    code, _, said = run(capsys, str(folder))
    assert (code, "--pickles" in said) == (1, True)
    code, shown, _ = run(capsys, str(folder), "--pickles", "--tp", "4")
    assert (code, shown.startswith(f"names: rank {culprit} on machine {culprit}")) == (0, True)


def test_nothing_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.txt").write_bytes(TEXT)
    (tmp_path / "rank-1.txt").write_bytes(TEXT)
    code, shown, _ = run(capsys, str(tmp_path))
    assert (code, shown.startswith("nothing known: ")) == (4, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--mesh", "dp=2", "--tp", "2"), 2, "--mesh names all axes"),
        (("--machines", "1", "--ranks-per-machine", "1"), 1, "has a dump of rank 1, and the sizes make 1 ranks"),
        (("--machines", "3", "--tp", "2"), 2, "cannot be split"),
    ],
)
def test_wrong_sizes(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-1.txt").write_bytes(TEXT)
    found, _, error = run(capsys, str(tmp_path), *arguments)
    assert (found, said in error) == (code, True), error


def test_ras_that_does_not_know_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank numbers within a smaller communicator are not the rank numbers of the job."""
    (tmp_path / "ras.json").write_bytes(report(communicator("0xa", [process(rank, rank, 9) for rank in range(4)])))
    code, _, said = run(capsys, str(tmp_path), "--machines", "8")
    assert code == 1
    assert "knows 4 ranks, and the sizes make 8" in said


def written(path: Path, factors: dict[int, float]) -> str:
    rows = times(factors)
    lines = (f"{one.step},{one.rank},{one.operation},{one.start},{one.duration}" for one in rows)
    path.write_text("\n".join(["step,rank,operation,start,duration", *lines]))
    return str(path)


def test_timings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "t.csv", {6: 1.5, 7: 1.5})

    code, shown, _ = run(capsys, "timings", file, "--ranks-per-machine", "2", "--pp", "2")
    assert code == 0
    assert shown.splitlines()[0].startswith("machine: machine 3 has most slow ranks in 5 of 5 rounds")

    code, shown, _ = run(capsys, "timings", file, "--ranks-per-machine", "2", "--pp", "2", "--json")
    found = json.loads(shown)
    assert (found["machines"], found["flags"], len(found["rounds"])) == ([3], 5, 5)

    code, shown, _ = run(capsys, "timings", written(tmp_path / "e.csv", {}))
    assert (code, shown.startswith("even: ")) == (0, True)


def test_timings_that_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("step,rank,operation,start,duration\n1,0,forward,0,1\n")
    assert run(capsys, "timings", str(tmp_path / "t.csv"))[0] == 4
    code, _, said = run(capsys, "timings", str(tmp_path / "t.csv"), "--unit", "h")
    assert (code, "one of s, ms, us, ns" in said) == (2, True)
