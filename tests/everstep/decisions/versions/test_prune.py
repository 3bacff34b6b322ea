"""Which versions a store need not keep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.versions.prune import KEPT, YOUNG_S, StoredVersion, prunable

OLD_S = YOUNG_S * 2
AGES = st.floats(0, YOUNG_S * 4)
CODES = ["a", "b", "c", ""]
STORED = st.builds(
    StoredVersion,
    job=st.sampled_from(["gpt", "other"]),
    id=st.integers(0, 60).map(str),
    code=st.sampled_from(CODES),
    age_s=AGES,
)
VERSIONS = st.lists(STORED, max_size=60, unique_by=lambda one: (one.job, one.id))
SNAPSHOTS = st.dictionaries(st.sampled_from([*CODES[:3], "d"]), AGES)
NEEDED = st.sets(st.integers(0, 60).map(str), max_size=10)


@given(VERSIONS, SNAPSHOTS, NEEDED)
def test_nothing_goes_that_may_be_needed(
    versions: list[StoredVersion], code: dict[str, float], needed: set[str]
) -> None:
    going = prunable(versions, code, job="gpt", needed=needed)
    stay = [one for one in versions if one not in going.versions]
    newest = sorted((one for one in versions if one.job == "gpt"), key=lambda one: one.age_s)[:KEPT]
    for one in going.versions:
        assert one.job == "gpt"
        assert one.id not in needed
        assert one.age_s > YOUNG_S
        assert one.age_s >= max(kept.age_s for kept in newest)
    assert len([one for one in stay if one.job == "gpt"]) >= min(
        KEPT, len([one for one in versions if one.job == "gpt"])
    )
    assert not set(going.code) & {one.code for one in stay}
    assert all(code[digest] > YOUNG_S for digest in going.code)


@given(VERSIONS, SNAPSHOTS, NEEDED)
def test_what_stays_is_needed_new_or_young(
    versions: list[StoredVersion], code: dict[str, float], needed: set[str]
) -> None:
    going = prunable(versions, code, job="gpt", needed=needed)
    stay = [one for one in versions if one not in going.versions]
    own = [one for one in stay if one.job == "gpt" and one.id not in needed and one.age_s > YOUNG_S]
    assert len(own) <= KEPT
    for digest in code.keys() - going.code:
        assert code[digest] <= YOUNG_S or digest in {one.code for one in stay}


@given(VERSIONS, SNAPSHOTS, NEEDED)
def test_what_is_carried_out_leaves_nothing_more_to_do(
    versions: list[StoredVersion], code: dict[str, float], needed: set[str]
) -> None:
    going = prunable(versions, code, job="gpt", needed=needed)
    stay = [one for one in versions if one not in going.versions]
    again = prunable(
        stay, {name: age for name, age in code.items() if name not in going.code}, job="gpt", needed=needed
    )
    assert (again.versions, again.code) == ([], [])


def test_the_oldest_of_many_go_with_their_code() -> None:
    versions = [StoredVersion("gpt", str(n), f"code-{n}", OLD_S + n) for n in range(KEPT + 3)]
    code = {one.code: one.age_s for one in versions} | {"left": OLD_S, "fresh": 0.0}
    going = prunable(versions, code, job="gpt", needed={"21"})
    assert [one.id for one in going.versions] == ["20", "22"]
    assert going.code == ["code-20", "code-22", "left"]
    assert prunable(versions, code, job="other", needed=set()).versions == []
