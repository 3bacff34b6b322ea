"""The texts that workflows show in the Web UI."""

from __future__ import annotations

from everstep.decisions.keep.copies_text import copies_text
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.stage import StageRecord
from everstep.model.state_copy import Restored, StateCopies, Tier
from workflows import web_ui


def copy(rank: int, tier: Tier, machine: str) -> StateCopies:
    return StateCopies.one(rank=rank, completed_steps=20, tier=tier, machine=machine)


def held(rank: int, step: int, reason: str = "") -> StateCopies:
    return StateCopies.one(
        rank=rank, machine="m1", completed_steps=step, tier=Tier.BACKUP, valid=not reason, reason=reason
    )


def plain(text: str) -> str:
    return text.replace(web_ui.NO_BREAK, " ")


def test_what_was_brought_is_told_with_ranks_sources_size_and_time() -> None:
    moved = [*[copy(rank, Tier.BACKUP, "m1") for rank in (4, 5)], copy(6, Tier.DISK, "m3"), copy(7, Tier.REMOTE, "m3")]

    text = web_ui.restored_text(Restored(moved=moved, bytes=12_300_000, seconds=0.08))

    assert plain(text) == (
        "moved 4 copies, 12.3 MB in 0.08 s: ranks 4, 5 from backups on m1; rank 6 from disk of m3; "
        "rank 7 from remote storage"
    )


def test_of_many_copies_the_first_are_named() -> None:
    many = [copy(rank, Tier.BACKUP, f"m{rank // 20}") for rank in range(100)]

    text = copies_text(many)

    assert text.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more from backups on m0; ")
    assert text.endswith("; and from 1 more")
    assert len(web_ui.summary(text)) <= web_ui.SUMMARY_CHARACTERS


def test_what_failed_comes_first() -> None:
    failed = [held(4, 20, "the checksum does not hold")]

    text = web_ui.restored_text(Restored(moved=[copy(5, Tier.OWN, "m1")], failed=failed, unreachable=["m3"]))

    assert text.startswith("m3 does not answer; backup of rank 4 on m1: the checksum does not hold; moved 1 copy")
    assert web_ui.restored_text(Restored()) == "nothing was to be moved"


def test_a_stop_names_who_did_not_answer() -> None:
    silent = Evidence(generation=1, unreachable=["m2"])

    assert web_ui.stopped_text(silent, "rank 1 on m0 ended by SIGKILL") == (
        "m2 does not answer; rank 1 on m0 ended by SIGKILL"
    )
    assert web_ui.stopped_text(Evidence(generation=1), "") == "no rank ended by itself"


def test_what_was_found_is_told_by_steps() -> None:
    assert web_ui.found_text([held(0, 20), held(1, 20), held(0, 15), held(1, 10, "cut off")]) == (
        "4 copies, of steps 20, 15"
    )
    assert web_ui.found_text([]) == "no further copies"


def test_a_jobs_page_says_where_it_began_and_what_its_backups_survive() -> None:
    spec = JobSpec(name="gpt", script="/job.py", machines=4, ranks_per_machine=2, tp=2, pp=2)
    state = JobState(spec=spec, machines=[], resume_from=120, backups="losing both costs the steps since then")

    text = web_ui.job_page(state, "default")

    assert "Started from step 120." in text
    assert "Backups: losing both costs the steps since then." in text
    assert "Started from" not in web_ui.job_page(state.model_copy(update={"resume_from": None}), "default")


def test_the_page_of_an_incident_is_a_table_of_its_stages() -> None:
    stages = [StageRecord(name="stop", seconds=0.031, found="rank 5 on m2 ended by SIGKILL")]
    page = " ".join(web_ui.incident_page("Recovered", stages, "default", {"Job": "job/gpt"}, "").split())
    assert "| Stage | Took | Result |" in page
    assert "| stop | 0.03 s | rank 5 on m2 ended by SIGKILL |" in page
