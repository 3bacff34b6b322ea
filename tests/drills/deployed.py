"""Deploys a cluster by hand, as docs/guides/deploy.md and the systemd units say, in network namespaces.

The control host and three machines have a namespace each, joined by a bridge. Commands, files and options come from the
document and the units; only paths and names are replaced by those of the test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane.local import temporal_binary, temporal_server
from controlplane.local.network import CONTROL, Network

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
BOOK = (GUIDES / "deploy.md").read_text()
CONTROL_ADDRESS = "10.99.0.1"
MACHINES = {f"gpu-{number}": f"10.99.0.{11 + number}" for number in range(3)}
LIMIT_S = 60.0
POLL_S = 0.5
"""The pause between two ``status`` commands, since each of them takes a second of CPU time."""


def blocks(section: str, book: str = BOOK) -> list[str]:
    """Return the blocks of code in a section of a document."""
    text = book.split(f"\n## {section}", 1)[1].split("\n## ", 1)[0]
    return [found.group(1) for found in re.finditer(r"```\w*\n(.*?)```", text, re.DOTALL)]


def variables(block: str) -> dict[str, str]:
    """Return the variables of a file that the document shows."""
    return dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def exec_start(unit: str) -> list[str]:
    """Return the command line of a systemd unit."""
    text = (ROOT / "deploy" / "systemd" / unit).read_text().replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


STEPS = 30
JOB = f"""
script = "{ROOT}/examples/gpt.py"
args = [
    "--steps", "{STEPS}", "--seq", "16", "--layers", "2", "--dim", "32", "--step-seconds", "PACE", "--losses", "LOSSES",
]
machines = 3

[policy.hang]
floor_s = 4.0
"""
Losses = dict[int, float]
Holds = Callable[[dict[str, Any]], bool]


def over(found: dict[str, Any]) -> bool:
    """Return whether a job has ended."""
    return found["status"] in {"finished", "failed", "stopped"}


def read(path: Path) -> Losses:
    """Return the last loss of each step. Lost steps are computed again, so they have several losses."""
    return {row["step"]: row["loss"] for row in map(json.loads, path.read_text().splitlines())}


class Deployed:
    """The deployed cluster, as a context manager."""

    def __init__(self, folder: Path, ledger: str = "") -> None:
        self.folder = folder
        self.ledger = ledger or f"sqlite:///{folder}/ledger.db"
        self.network = Network(MACHINES, CONTROL_ADDRESS)
        self.shm = {machine: Path(f"/dev/shm/everstep-test-{os.getpid()}-{machine}") for machine in MACHINES}
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.inventory = folder / "machines.toml"

    def __enter__(self) -> Deployed:
        try:
            self.network.make()
            self._certify()
            self._start_temporal()
            for machine in MACHINES:
                self._start_agent(machine)
            self.start_workers()
            self._write_inventory()
            self._await()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.network.remove()
        for process in self.started.values():
            process.wait(LIMIT_S)
        for shm in self.shm.values():
            shutil.rmtree(shm, ignore_errors=True)

    # Commands of a user.

    def everstep(self, *words: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run one ``everstep`` command on the control host."""
        return subprocess.run(
            self._on(CONTROL, [*EVERSTEP, *words]),
            env=self._person(),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def start_job(self, name: str, pace_s: float = 0.5) -> Path:
        """Start the example on all machines, with steps of ``pace_s`` seconds. Returns the file of its losses."""
        losses, path = self.folder / f"{name}.jsonl", self.folder / f"{name}.toml"
        path.write_text(JOB.replace("LOSSES", str(losses)).replace("PACE", str(pace_s)))
        done = self.everstep("run", str(path), "--name", name, "--detach")
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.logs()}"
        return losses

    def status(self, job: str) -> dict[str, Any]:
        """Return the JSON of ``everstep status JOB``."""
        done = self.everstep("status", job, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def until(self, job: str, holds: Holds, limit_s: float = 150.0) -> dict[str, Any]:
        """Repeat ``everstep status`` until ``holds`` is true. A command may fail while the network is broken."""
        found: dict[str, Any] = {}
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            done = self.everstep("status", job, "--json")
            if done.returncode == 0:
                found = json.loads(done.stdout)
                if holds(found):
                    return found
            time.sleep(POLL_S)
        raise AssertionError(f"{found}\n{self.logs()}")

    def trained(self, losses: Path, step: int, limit_s: float = 150.0) -> None:
        """Wait until the first rank of a job has written the loss of a step."""
        deadline = time.monotonic() + limit_s
        while not losses.exists() or step not in read(losses):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def kill_workers(self) -> None:
        """Send SIGKILL to both workers."""
        for number in (1, 2):
            self.started[f"worker-{number}"].kill()
            self.started[f"worker-{number}"].wait(LIMIT_S)

    def start_workers(self) -> None:
        """Start both workers, as systemd does at first and after their death."""
        for number in (1, 2):
            self._start_worker(number)

    def logs(self) -> str:
        """Return the last lines of the log of each process."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]) for path in paths
        )

    def rotate(self, command: str) -> None:
        """Run a command in the folder with the token and the certificates, on the control host and on all machines."""
        for host in (CONTROL, *MACHINES):
            self._run(command, self._etc(host))

    def certify_again(self, machine: str) -> None:
        """Issue another key and another certificate for an agent, in place of those that it uses."""
        shutil.copy(self.folder / "ca.key", self._etc(machine))
        self._run(self._issue(machine), self._etc(machine))
        (self._etc(machine) / "ca.key").unlink()

    # Steps of the document.

    def _certify(self) -> None:
        authority, _ = blocks("2. The token")
        self._run(authority, self.folder)
        for machine in MACHINES:
            self._etc(machine).mkdir(mode=0o700)
            for name in ("ca.crt", "token"):
                shutil.copy(self.folder / name, self._etc(machine))
            self.certify_again(machine)

    def _issue(self, machine: str) -> str:
        _, agent = blocks("2. The token")
        return agent.replace("10.0.4.17", MACHINES[machine]).replace("gpu-0417", machine)

    def _start_agent(self, machine: str) -> None:
        [env, *_] = blocks("3. Agents")
        given = variables(env.replace("10.0.4.17", MACHINES[machine]).replace("gpu-0417", machine))
        self._start(machine, "everstep-agent.service", given, f"agent-{machine}")

    def _start_worker(self, number: int) -> None:
        self._start(CONTROL, "everstep-worker@.service", self._worker_env(), f"worker-{number}")

    def _worker_env(self) -> dict[str, str]:
        [env] = blocks("5. Workers")
        given = variables(env.replace("temporal.example", CONTROL_ADDRESS))
        given["EVERSTEP_LEDGER_URL"] = self.ledger
        return {name: value for name, value in given.items() if not name.startswith("TEMPORAL_TLS")}

    def _person(self) -> dict[str, str]:
        given = self._paths(self._worker_env(), CONTROL)
        given.pop("EVERSTEP_LOG_FORMAT")
        return self._clean() | given | {"EVERSTEP_INVENTORY": str(self.inventory), "COLUMNS": "160"}

    def _write_inventory(self) -> None:
        example = blocks("6. The inventory")[0]
        entry = example.split("[[machine]]")[1].split("\n\n")[0]
        text = example.split("[[machine]]")[0].replace("standbys = 1", "standbys = 0")  # the job uses all machines
        for number, (machine, address) in enumerate(MACHINES.items()):
            text += (
                "[[machine]]"
                + entry.replace("10.0.4.17", address).replace("gpu-0417", machine).replace("rack-12", f"rack-{number}")
                + "\n\n"
            )
        self.inventory.write_text(text)

    def _start_temporal(self) -> None:
        found = temporal_binary.installed(print) or temporal_binary.obtain(print)
        command = temporal_server.start_command(
            found[0], port=7233, ui_port=8233, database=self.folder / "temporal.db", namespace="everstep"
        )
        command[command.index("127.0.0.1")] = (
            "0.0.0.0"  # the server's parts connect to each other over this namespace's loopback
        )
        self._spawn(CONTROL, command, self._clean(), "temporal")

    def _await(self) -> None:
        """Wait until ``everstep status`` reports that all machines and the workers answer."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            done = self.everstep("status")
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline, f"{done.stdout}{done.stderr}{self.logs()}"

    # Processes.

    def _start(self, host: str, unit: str, env: Mapping[str, str], log: str) -> None:
        given = self._paths(env, host)
        words = [re.sub(r"\$\{(\w+)\}", lambda found: given[found.group(1)], word) for word in exec_start(unit)]
        command = [*EVERSTEP, *(self._path(word, host) for word in words[1:])]
        self._spawn(host, command, self._clean() | given, log)

    def _spawn(self, host: str, command: Sequence[str], env: Mapping[str, str], log: str) -> None:
        with (self.folder / f"{log}.log").open("ab") as output:
            self.started[log] = subprocess.Popen(
                self._on(host, command), env=dict(env), stdout=output, stderr=output, start_new_session=True
            )

    def _on(self, host: str, command: Sequence[str]) -> list[str]:
        return [*self.network.inside(host), *command]

    def _etc(self, host: str) -> Path:
        return self.folder if host == CONTROL else self.folder / f"etc-{host}"

    def _path(self, word: str, host: str) -> str:
        word = word.replace("/etc/everstep", str(self._etc(host))).replace("/mnt/everstep", str(self.folder / "mnt"))
        word = word.replace("/var/lib/everstep/agent", str(self.folder / f"state-{host}"))
        return word.replace("/dev/shm/everstep-agent", str(self.shm[host])) if host in self.shm else word

    def _paths(self, env: Mapping[str, str], host: str) -> dict[str, str]:
        return {name: self._path(value, host) for name, value in env.items()}

    def _clean(self) -> dict[str, str]:
        """Return the test's environment, without all settings of everstep and Temporal except the cluster's home."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "TEMPORAL_"))}
        return kept | {
            "TEMPORAL_CONFIG_FILE": str(self.folder / "none.toml"),
            "EVERSTEP_HOME": str(self.folder / "home"),
        }

    @staticmethod
    def _run(script: str, folder: Path) -> None:
        subprocess.run(["bash", "-e", "-c", script], cwd=folder, check=True, capture_output=True)


EVERSTEP = [sys.executable, "-P", "-m", "console.main"]
