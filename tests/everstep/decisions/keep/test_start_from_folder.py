"""A folder from which a job cannot start is refused with the reason."""

from __future__ import annotations

import pytest

from everstep.decisions.keep.starts import Folder, folder_of, judge_folder

PATH = "/disk/gpt/step-000000120"


def test_a_path_has_root_job_and_step() -> None:
    assert folder_of(PATH) == Folder("/disk", "gpt", 120)
    assert folder_of(PATH + "/") == Folder("/disk", "gpt", 120)


@pytest.mark.parametrize("path", ["", "/disk/gpt", "disk/gpt/step-000000120", "/disk/gpt/step-12", "/step-000000120"])
def test_other_paths_are_no_checkpoints(path: str) -> None:
    assert folder_of(path) is None


def test_a_folder_that_every_machine_sees_in_full_is_accepted() -> None:
    assert judge_folder(PATH, {"m0": {0: "", 1: ""}, "m1": {0: "", 1: ""}}) == ""


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"m0": {}, "m1": {}}, "no machine sees a checkpoint"),
        ({"m0": {0: "", 1: ""}, "m1": {1: ""}}, "m1 sees 1 of the 2 ranks"),
        ({"m0": {0: "", 1: "checksum"}}, "/disk/gpt/step-000000120 is damaged, as seen by m0: rank 1: checksum"),
        ({"m0": {0: "", 2: ""}}, "of 3 ranks it lacks rank 1. Copy their files (rank-1.safetensors, rank-1.json"),
    ],
)
def test_the_answer_names_what_is_wrong(seen: dict[str, dict[int, str]], said: str) -> None:
    assert said in judge_folder(PATH, seen)


def test_missing_last_ranks_are_noticed_by_the_sizes_of_the_saving_job() -> None:
    seen = {"m0": dict.fromkeys(range(3), "")}
    four = dict.fromkeys(range(3), ("", "2,2,1,1,pp-dp-tp"))
    assert "of 4 ranks it lacks rank 3. Copy their files (rank-3.safetensors" in judge_folder(PATH, seen, four)
    assert judge_folder(PATH, {"m0": dict.fromkeys(range(4), "")}, four) == ""
    many = dict.fromkeys(range(3), ("", "8,8,1,1,pp-dp-tp"))
    assert "lacks rank 3, 4, 5, 6, 7, 8, 9, 10 and 53 more" in judge_folder(PATH, seen, many)


def test_files_of_different_jobs_in_one_folder_are_refused() -> None:
    seen = {"m0": {0: "", 1: ""}}
    sizes = "1,2,1,1,pp-dp-tp"
    runs = {0: ("20261121-1", sizes), 1: ("20261122-2", sizes)}
    assert "rank 0 is of run 20261121-1, rank 1 of 20261122-2" in judge_folder(PATH, seen, runs)
    sizes_differ = {0: ("", sizes), 1: ("", "2,1,1,1,pp-dp-tp")}
    assert "is of sizes 1,2,1,1,pp-dp-tp" in judge_folder(PATH, seen, sizes_differ)
    assert judge_folder(PATH, seen, {0: ("20261121-1", ""), 1: ("", sizes)}) == "", (
        "a file of an older release names no run"
    )
