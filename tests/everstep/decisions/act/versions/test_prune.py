"""The versions and the code that a store may delete."""

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
def test_exactly_the_old_versions_and_code_that_nothing_needs_are_deleted(
    versions: list[StoredVersion], code: dict[str, float], needed: set[str]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prune, "KEPT", FEW)
        deleted = prunable(versions, code, job="gpt", needed=needed)
        kept = [version for version in versions if version not in deleted.versions]
        kept_code = {digest: age_s for digest, age_s in code.items() if digest not in deleted.code}
        again = prunable(kept, kept_code, job="gpt", needed=needed)
    own = sorted((one for one in versions if one.job == "gpt"), key=lambda one: (one.age_s, one.id))
    for version in deleted.versions:
        assert version in own[FEW:]
        assert version.id not in needed
        assert version.age_s > YOUNG_S
    named = {version.code for version in kept}
    assert not set(deleted.code) & named
    assert all(code[digest] > YOUNG_S for digest in deleted.code)

    assert all(version.id in needed or version.age_s <= YOUNG_S for version in own[FEW:] if version in kept)
    assert all(code[digest] <= YOUNG_S or digest in named for digest in code.keys() - deleted.code)
    assert (again.versions, again.code) == ([], [])


def test_the_oldest_versions_are_deleted_with_their_code() -> None:
    versions = [StoredVersion("gpt", str(n), f"code-{n}", OLD_S + n) for n in range(KEPT + 3)]
    code = {version.code: version.age_s for version in versions} | {"left": OLD_S, "fresh": 0.0}
    deleted = prunable(versions, code, job="gpt", needed={"21"})
    assert [version.id for version in deleted.versions] == ["20", "22"]
    assert deleted.code == ["code-20", "code-22", "left"]
    assert prunable(versions, code, job="other", needed=set()).versions == []
