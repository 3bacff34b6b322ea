"""Rules of this repository that no type checker can check."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import workflows.messages
from activities.registry import ACTIVITIES
from everstep import errors
from everstep.errors import EverstepError
from everstep.model import (
    eviction,
    evidence,
    finding,
    hang,
    incident,
    job_state,
    ladder,
    launch,
    notice,
    replay,
    slow,
    stage,
    state_copy,
    version,
)
from everstep.model.message import Words

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("everstep", "agent", "activities", "workflows", "controlplane", "drills", "console")
HEAVY = ("torch", "numpy", "pydantic", "grpc", "temporalio", "google.protobuf", "sqlalchemy", "typer", "rich")
REGISTRIES = ("py|pi.org", "files.python|hosted.org", "proxy.go|lang.org", "sum.go|lang.org", "registry.npm|js.org")
"""Hosts that no file may name. The names are split, so that this file does not contain them."""


def sources(layer: str) -> list[Path]:
    return sorted(path for path in (ROOT / layer).rglob("*.py") if path.parent != ROOT / "agent" / "v1")


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of each module that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module or ""


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: what belongs to the project is not known")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def modules() -> dict[str, Path]:
    """Return every shipped module by its full name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for layer in LAYERS
        for path in sources(layer)
    }


def test_one_module_reads_proc() -> None:
    named = {
        path.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for path in sources(layer)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and str(node.value).startswith("/proc")
    }
    assert named == {"everstep/system/procfs.py"}


def test_no_two_classes_have_one_name() -> None:
    found = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_error_is_in_one_module() -> None:
    """Errors that control a program's flow, or that belong to a separate program, derive from ``Exception``."""
    names = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, EverstepError)}
    found = [
        f"{name}: {node.name}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & names
    ]
    assert {one.partition(":")[0] for one in found} == {"everstep.errors"}


def test_every_package_says_why_it_exists() -> None:
    folders = {path.parent for layer in LAYERS for path in sources(layer) if "migrations" not in path.parts}
    silent = []
    for folder in folders:
        file = folder / "__init__.py"
        if not file.exists() or len((ast.get_docstring(ast.parse(file.read_text())) or "").split()) < 5:
            silent.append(str(folder.relative_to(ROOT)))
    assert sorted(silent) == []


def test_importing_everstep_imports_nothing_heavy() -> None:
    program = f"import sys, everstep; print(*[name for name in {HEAVY} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_the_help_imports_nothing_heavy() -> None:
    heavy = [name for name in HEAVY if name not in ("typer", "rich")]
    program = (
        "import sys, contextlib, io, console.main\n"
        "with contextlib.redirect_stdout(io.StringIO()): assert console.main.run(['--help']) == 0\n"
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_workflows_load_no_ledger_no_agent_and_no_torch() -> None:
    """Workflows load the files of activities. So an activity imports these modules only where its code runs."""
    heavy = ("torch", "numpy", "sqlalchemy", "alembic", "agent.client", "agent.v1.agent_pb2", "activities.tools")
    program = f"import sys, workflows.registry; print(*[name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""


def test_one_module_makes_consoles_and_text_for_terminals() -> None:
    """So no text from outside is used as markup. Other modules get consoles and text from ``console/terminal.py``."""
    made = re.compile(r"rich\.(console|text|markup) import (?!RenderableType$)", re.MULTILINE)
    found = [path for path in (ROOT / "console").rglob("*.py") if made.search(path.read_text())]

    assert found == [ROOT / "console" / "terminal.py"]


def test_no_dependency_owns_one_of_our_names() -> None:
    """A distribution with a top-level ``agent`` or ``console`` would hide ours, or ours would hide it."""
    owners = importlib.metadata.packages_distributions()
    foreign = {layer: [name for name in owners.get(layer, []) if name != "everstep"] for layer in LAYERS}
    assert not {layer: names for layer, names in foreign.items() if names}


NOT_IMPORTED = {
    "py-spy": "a program, which `everstep doctor` looks for",
    "safetensors": "torch's reader of such files imports it when it reads",
    "s3fs": "fsspec loads it by the scheme of a URL",
    "accelerate": "transformers imports it when it trains",
    "pyarrow": "loaded by name where a table of times is Parquet",
    "tensorboard": "torch's SummaryWriter imports it",
}


ELSEWHERE = {"lightning", "transformers", "wandb"}
"""These are imported where a script uses them. Their tests have separate environments (``make integrations``)."""


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra, names in project["optional-dependencies"].items() if extra != "dev" for name in names]
    declared = {_plain(name) for name in [*project["dependencies"], *extras]}
    owners = importlib.metadata.packages_distributions()
    names = {name for path in modules().values() for full in imports(path) for name in [full.split(".")[0]]}
    foreign = names - set(sys.stdlib_module_names) - set(LAYERS)
    unowned = sorted(name for name in foreign if name != "google" and not owners.get(name) and name not in ELSEWHERE)
    imported = {_plain(owner) for name in foreign for owner in owners.get(name, []) if name != "google"} | {"protobuf"}
    imported |= foreign & ELSEWHERE

    assert unowned == []
    assert sorted(declared - imported) == sorted(NOT_IMPORTED)
    assert sorted(imported - declared) == []


def test_every_layer_is_packaged_and_has_its_imports_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tuple(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == LAYERS
    assert tuple(project["tool"]["importlinter"]["root_packages"]) == (*LAYERS, "soaks"), (
        "only developers have soaks, so they are checked but not packaged"
    )


def test_the_grpc_stubs_are_those_of_the_schema(tmp_path: Path) -> None:
    made = subprocess.run(["sh", ROOT / "deploy/stubs.sh", tmp_path], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(fresh) == 4
    stale = [str(path) for path, text in fresh.items() if (ROOT / path).read_text() != text]
    assert not stale, "run `make stubs`"


def test_proto_holds_schemas_only() -> None:
    """A package named ``proto`` would break the distribution proto-plus."""
    assert not list((ROOT / "proto").rglob("*.py"))


def test_no_folder_of_tests_is_a_package_but_the_drills_which_share_a_cluster() -> None:
    found = sorted((ROOT / "tests").rglob("__init__.py"))
    assert found == [ROOT / "tests/__init__.py", ROOT / "tests/drills/__init__.py"]


def test_no_file_names_a_registry() -> None:
    hosts = [host.replace("|", "").encode() for host in REGISTRIES]
    wrong = [f"{path}: {host!r}" for path in tracked() for host in hosts if host in path.read_bytes()]
    assert not wrong


def test_the_lock_pins_every_requirement_with_hashes() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert pins
    assert all("==" in line and line.endswith("\\") for line in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {line.split("==")[0].split("[")[0].lower() for line in pins}
    missing = [name for name in wanted if _plain(name) not in names]
    assert not missing, "run `make lock`"


@pytest.mark.parametrize(("lock", "names"), [("installer", ["uv"]), ("build", ["editables", "hatchling"])])
def test_what_installs_and_builds_is_pinned_too(lock: str, names: list[str]) -> None:
    lines = (ROOT / "deploy" / f"{lock}.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith(" ")]
    assert all("==" in line and line.endswith("\\") for line in pins)
    assert {line.split("==")[0] for line in pins} >= set(names)
    assert f"deploy/{lock}.lock" in (ROOT / "deploy" / "setup.sh").read_text()


def _plain(requirement: str) -> str:
    for mark in "[<>=;! ":
        requirement = requirement.split(mark, maxsplit=1)[0]
    return requirement.lower().replace("_", "-")


def test_ci_runs_the_readmes_command() -> None:
    assert "\nexec make test\n" in (ROOT / ".ci/run").read_text()


MODELS = sorted(
    {
        one
        for module in (incident, job_state, notice, replay, workflows.messages)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, BaseModel) and one is not BaseModel
    }.union(ACTIVITIES),
    key=lambda one: one.__name__,
)
CLOSED_ON_PURPOSE = {"order"}
"""A mesh with an axis that this release does not know makes a job that this release cannot run."""


@pytest.mark.parametrize("model", MODELS, ids=lambda one: one.__name__)
def test_no_message_has_a_closed_list(model: type[BaseModel]) -> None:
    """A closed list in any message would make the complete message unreadable for the previous release."""
    holding = (
        *(incident, evidence, finding, hang, slow, eviction, notice, version),
        *(ladder, launch, replay, stage, state_copy),
    )
    words = {name: one for module in holding for name, one in vars(module).items()}
    known = {name for name, one in words.items() if isinstance(one, type) and issubclass(one, Enum)}
    schema = model.model_json_schema()
    closed = []

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            if ("enum" in value or "const" in value) and not (path[-1] in known or CLOSED_ON_PURPOSE & set(path)):
                closed.append(path)
            for key, inner in value.items():
                walk(inner, (*path, key))
        elif isinstance(value, list):
            for inner in value:
                walk(inner, path)

    walk(schema, (model.__name__,))

    assert closed == [], "use everstep.model.message: Words for an enum, AnyWord for a Literal"
    for name in known & set(schema.get("$defs", {})):
        assert issubclass(words[name], Words)
