"""The commands and options that the pages show exist, and the tutorial's script compiles."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from console.commands.drill import command_of
from console.main import COMMANDS, load
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.recovery_policy import RecoveryPolicy

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / "start").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^|&& |\| ) *everstep +([a-z]+)((?: +[^\s#|·`&]+)*)")


def calls(page: Path) -> list[tuple[str, list[str]]]:
    """Return each command in the code blocks of a page, with the words after it."""
    blocks = [re.sub(r"\\\n", " ", text) for language, text in FENCE.findall(page.read_text()) if not language]
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    return [(found[1], found[2].split(" -- ")[0].split()) for line in lines for found in CALL.finditer(line)]


def test_the_pages_show_commands() -> None:
    assert len([call for page in PAGES for call in calls(page)]) > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_exists(page: Path) -> None:
    for name, words in calls(page):
        assert name in COMMANDS, f"everstep {name}"
        command: Any = load(name)
        if name == "drill" and words and not words[0].startswith("-"):
            command = command_of(words[0], words[1:])
        below = getattr(command, "commands", {})
        command = below.get(words[0], below.get("show", below.get("hang", command))) if below and words else command
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known, f"everstep {name} has no {', '.join(used - known)}"


def test_the_script_of_the_tutorial_compiles() -> None:
    [script] = [
        text for language, text in FENCE.findall((ROOT / "docs/start/tutorial.md").read_text()) if language == "python"
    ]
    compile(script, "train.py", "exec")


def job_files() -> list[tuple[str, dict[str, Any]]]:
    """Return each block of TOML in the docs, with its page's name."""
    found = [(page, FENCE.findall(page.read_text())) for page in (ROOT / "docs").rglob("*.md")]
    return [
        (page.name, tomllib.loads(text)) for page, blocks in found for language, text in blocks if language == "toml"
    ]


def test_the_tables_that_pages_show_are_valid() -> None:
    shown = [(page, table) for page, table in job_files() if {"policy", "checkpoint"} & table.keys()]
    assert len(shown) > 4
    for page, table in shown:
        unknown = _unknown(RecoveryPolicy(), table.get("policy", {})) | _unknown(
            CheckpointPolicy(), table.get("checkpoint", {})
        )
        assert unknown == set(), page


def _unknown(policy: BaseModel, table: dict[str, Any]) -> set[str]:
    """Check that a table's values are valid, and return the settings that the policy does not have."""
    type(policy).model_validate(table)
    names = table.keys() - type(policy).model_fields.keys()
    for name in table.keys() - names:
        if isinstance(group := getattr(policy, name), BaseModel):
            names |= _unknown(group, table[name])
    return set(names)


def test_the_settings_that_pages_name_exist() -> None:
    groups = {name: group for name, group in RecoveryPolicy() if isinstance(group, BaseModel)}
    texts = {page.name: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    named = {(page, *found) for page, text in texts.items() for found in re.findall(r"`([a-z]+)\.([a-z_]+)`", text)}
    named = {(page, group, name) for page, group, name in named if group in groups and f"{group}.{name}" != "park.py"}
    assert len(named) > 20
    assert [one for one in named if one[2] not in type(groups[one[1]]).model_fields] == []
