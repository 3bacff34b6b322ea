"""A folder that a job cannot start from is refused with the reason."""

from __future__ import annotations

import pytest

from everstep.decisions.folder import Folder, folder_of, judge_folder

PATH = "/disk/gpt/step-000000120"


def test_a_path_has_root_job_and_step() -> None:
    assert folder_of(PATH) == Folder("/disk", "gpt", 120)
    assert folder_of(PATH + "/") == Folder("/disk", "gpt", 120)


@pytest.mark.parametrize("path", ["", "/disk/gpt", "disk/gpt/step-000000120", "/disk/gpt/step-12", "/step-000000120"])
def test_other_paths_are_no_checkpoints(path: str) -> None:
    assert folder_of(path) is None


def test_a_folder_that_every_machine_sees_whole_will_do() -> None:
    assert judge_folder(PATH, {"m0": {0: "", 1: ""}, "m1": {0: "", 1: ""}}) == ""


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"m0": {}, "m1": {}}, "no machine sees a checkpoint"),
        ({"m0": {0: "", 1: ""}, "m1": {1: ""}}, "m1 sees 1 of the 2 ranks"),
        ({"m0": {0: "", 1: "checksum"}}, "m0 finds /disk/gpt/step-000000120 damaged: rank 1: checksum"),
        ({"m0": {0: "", 2: ""}}, "lacks rank 1"),
    ],
)
def test_what_is_wrong_is_named(seen: dict[str, dict[int, str]], said: str) -> None:
    assert said in judge_folder(PATH, seen)
