"""Which versions a store need not keep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.versions import prune
from everstep.decisions.act.versions.prune import KEPT, YOUNG_S, StoredVersion, prunable

OLD_S = YOUNG_S * 2
FEW = 3
AGES = st.floats(0, YOUNG_S * 4)
CODES = ["a", "b", "c", ""]
STORED = st.builds(
    StoredVersion,
    job=st.sampled_from(["gpt", "other"]),
    id=st.integers(0, 60).map(str),
    code=st.sampled_from(CODES),
    age_s=AGES,
)
VERSIONS = st.lists(STORED, max_size=20, unique_by=lambda one: (one.job, one.id))
SNAPSHOTS = st.dictionaries(st.sampled_from([*CODES[:3], "d"]), AGES)
NEEDED = st.sets(st.integers(0, 60).map(str), max_size=10)


@settings(max_examples=60)
@given(VERSIONS, SNAPSHOTS, NEEDED)
def test_what_goes_is_old_and_needed_by_nobody_and_nothing_else_stays(
    versions: list[StoredVersion], code: dict[str, float], needed: set[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prune, "KEPT", FEW)
        _holds(versions, code, needed)


def _holds(versions: list[StoredVersion], code: dict[str, float], needed: set[str]) -> None:
    going = prunable(versions, code, job="gpt", needed=needed)
    stay = [one for one in versions if one not in going.versions]
    own = sorted((one for one in versions if one.job == "gpt"), key=lambda one: (one.age_s, one.id))
    for one in going.versions:
        assert one in own[FEW:]
        assert one.id not in needed
        assert one.age_s > YOUNG_S
    named = {one.code for one in stay}
    assert not set(going.code) & named
    assert all(code[digest] > YOUNG_S for digest in going.code)

    assert all(one.id in needed or one.age_s <= YOUNG_S for one in own[FEW:] if one in stay)
    assert all(code[digest] <= YOUNG_S or digest in named for digest in code.keys() - going.code)
    left = {digest: age_s for digest, age_s in code.items() if digest not in going.code}
    again = prunable(stay, left, job="gpt", needed=needed)
    assert (again.versions, again.code) == ([], [])


def test_the_oldest_of_many_go_with_their_code() -> None:
    versions = [StoredVersion("gpt", str(n), f"code-{n}", OLD_S + n) for n in range(KEPT + 3)]
    code = {one.code: one.age_s for one in versions} | {"left": OLD_S, "fresh": 0.0}
    going = prunable(versions, code, job="gpt", needed={"21"})
    assert [one.id for one in going.versions] == ["20", "22"]
    assert going.code == ["code-20", "code-22", "left"]
    assert prunable(versions, code, job="other", needed=set()).versions == []
