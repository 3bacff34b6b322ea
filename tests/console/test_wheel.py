"""An installation from the wheel works without a checkout: commands, the drills' example, and the Temporal module."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import console, everstep, agent, activities, workflows
from drills.spec.request import example
from controlplane.local import temporal_binary
for module in (console, everstep, agent, activities, workflows):
    print(module.__file__)
print(example("gpt.py"))
print(temporal_binary.TOOL_MODULE / "go.mod")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    uv = shutil.which("uv") or str(ROOT / ".tools" / "uv" / "bin" / "uv")
    out = tmp_path_factory.mktemp("wheel")
    command = [uv, "build", "--wheel", "--quiet", "--build-constraints", "deploy/build.lock", "--out-dir", str(out)]
    command += ["--python", sys.executable, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [built] = out.glob("everstep-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with only the wheel. Its dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "PYTHON"))}
    command = [str(installed / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_wheel_has_everything_that_a_cluster_needs(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-c", PROGRAM, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert len(paths) == 7
    for path in paths:
        assert path.is_relative_to(installed), f"{path} is in the checkout, not in the wheel"
        assert path.exists()


@pytest.mark.parametrize("arguments", [["--version"], ["drill", "--list"], ["run", "--help"]])
def test_commands_of_the_wheel_start(installed: Path, tmp_path: Path, arguments: list[str]) -> None:
    done = run(installed, "-m", "console.main", *arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_wheel_has_neither_tests_nor_compiled_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/")) or name.endswith((".pyc", ".so"))]
    assert "controlplane/installed/examples/gpt.py" in names
