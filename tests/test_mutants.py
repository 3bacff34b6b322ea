"""The list of mutants agrees with the current code, and a mutant that no test notices is an error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutants, rewrite
from tests.mutants import ROOT, Mutant

MUTANTS = mutants.load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_it_changes_what_is_there_and_names_tests_that_are_there(mutant: Mutant) -> None:
    broken = mutant.applied(ROOT)
    assert broken != ast.unparse(ast.parse(mutant.file(ROOT).read_text()))
    assert ast.parse(broken)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


SIGN = "ONE = 1\n\ndef sign(x: int) -> int:\n    return ONE if x > 0 else -1  # the sign\n"
TEST = "from sign import sign\n\ndef test_sign() -> None:\n    assert sign(5) == 1\n"


@pytest.mark.parametrize(
    ("within", "find", "put", "problem"),
    [
        ("sign.sign", "x > 0", "x < 0", ""),
        ("sign.sign", "x > 0", "x >= 0", "lives: none of test_sign.py fails"),
        ("sign.ONE", "1", "missing", "nothing was tested"),
        ("sign.ONE", "x > 0", "x < 0", ""),
        ("sign.sign", "x == 0", "x", "0 pieces"),
        ("sign.renamed", "x > 0", "x < 0", ""),
        ("sine.sign", "x > 0", "x", "no such module"),
    ],
)
def test_what_no_test_notices_is_an_error(tmp_path: Path, within: str, find: str, put: str, problem: str) -> None:
    (tmp_path / "sign.py").write_text(SIGN)
    (tmp_path / "test_sign.py").write_text(TEST)
    mutant = Mutant(breaks="the sign", within=within, find=find, put=put, tests=("test_sign.py",))
    [(tried, wrong, _)] = mutants.tried(tmp_path, [mutant])

    assert tried == mutant
    assert problem in wrong if problem else not wrong
    assert (tmp_path / "sign.py").read_text() == SIGN, (
        "the mutant was undone, so the next mutant begins with correct code"
    )


CODE = """
class Shop:
    def price(self, count, each):
        if count > self.limit:  # a discount
            each = self.reduced(each)
        total = count * each
        return total
"""


@pytest.mark.parametrize(
    ("find", "put", "line"),
    [
        ("count > self.limit", "False", "if False:"),
        ("number > self.limit", "number >= self.limit", "if count >= self.limit:"),
        ("number > self.most", "number >= self.most", ""),
        ("total = count*each", "pass", "pass"),
        ("return self.reduced(each)", "return each", ""),
        ("total = count * each\nreturn total", "return count", "return count"),
        ("count", "0", ""),
    ],
    ids=["same", "renamed", "another", "layout", "absent", "statements", "several"],
)
def test_a_piece_is_found_by_its_form_and_most_of_its_names(find: str, put: str, line: str) -> None:
    if not line:
        with pytest.raises(ValueError, match="pieces like"):
            rewrite.rewritten(CODE, ["Shop", "price"], find, put)
        return
    changed = rewrite.rewritten(CODE, ["Shop", "price"], find, put)
    assert line in [text.strip() for text in changed.splitlines()]
    assert changed.count("def price") == 1
