"""The list of mutants is about the code as it is, and a mutant that lives is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import ROOT, Mutant

MUTANTS = mutants.load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.breaks)
def test_it_changes_what_is_there_and_names_tests_that_are_there(mutant: Mutant) -> None:
    assert mutant.applied(ROOT) != (ROOT / mutant.file).read_text()
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


SIGN = "def sign(x: int) -> int:\n    return 1 if x > 0 else -1\n"
TEST = "from sign import sign\n\ndef test_sign() -> None:\n    assert sign(5) == 1\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x > 0", "x < 0", ""),
        ("x > 0", "x >= 0", "lives: none of test_sign.py fails"),
        ("x > 0", "x >", "nothing was tested"),
        ("x == 0", "x", "0 times"),
        ("x", "y", "2 times"),
    ],
)
def test_what_no_test_notices_is_an_error(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "sign.py").write_text(SIGN)
    (tmp_path / "test_sign.py").write_text(TEST)
    mutant = Mutant(breaks="the sign", file="sign.py", old=old, new=new, tests=("test_sign.py",))
    [(tried, problem, _)] = mutants.tried(tmp_path, [mutant])

    assert tried == mutant
    assert said in problem if said else not problem
    assert (tmp_path / "sign.py").read_text() == SIGN, "the next mutant begins with sound code"
