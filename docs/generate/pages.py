"""Every page of the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generate import cases, machines, programs, rules, settings
from docs.generate.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "reference"
MADE = "<!-- Made by `make docs` from the code. Change the code, not this page. -->"

PAGES: dict[str, tuple[str, Callable[[], str], str]] = {
    # file: (title, what makes it, what it lists)
    "detection-rules.md": ("Rules of detection", rules.detection, "what opens an incident"),
    "eviction-rules.md": ("Rules of eviction", rules.eviction, "which machines leave a job, and which do not"),
    "restart-rules.md": (
        "Rules about a stopped job",
        rules.restart,
        "when it is launched again, and when it is parked",
    ),
    "ladder.md": ("Paths of the ladder", rules.ladder, "what is tried for each kind of failure, in which order"),
    "cases.md": ("Cases", cases.courses, "what is done about faults, case by case"),
    "fault-classes.md": ("Fault classes", rules.fault_classes, "what logs and exit codes say, and who is the owner"),
    "needs.md": ("Needs of agents", machines.needs, "rights and limits of an agent, and the lines that give them"),
    "inspections.md": ("Inspections", machines.inspections, "what an agent detects on its machine"),
    "inspection-settings.md": ("Inspection settings", machines.inspection_settings, "periods and thresholds"),
    "xids.md": ("Xids", machines.xids, "what NVIDIA's drivers report by number"),
    "diagnostic-tests.md": ("Diagnostic tests", machines.diagnostic_tests, "tests of machines without ranks"),
    "diagnostic-settings.md": ("Settings of diagnostic tests", machines.diagnostic_settings, "sizes and durations"),
    "policy.md": ("Recovery settings", settings.policy, "the table `[policy]` of a job file"),
    "checkpoint.md": ("Checkpoint settings", settings.checkpoint, "the table `[checkpoint]` of a job file"),
    "environment.md": ("Environment variables", settings.environment, "variables of processes and ranks"),
    "metrics.md": ("Metrics", programs.metrics, "what agents and workers serve for Prometheus"),
    "notices.md": ("Notices", settings.notices, "events that need a person"),
    "commands.md": ("Commands", programs.commands, "the command `everstep`"),
    "drill-faults.md": ("Faults of drills", programs.faults, "what `everstep drill` can break"),
    "errors.md": ("Errors", programs.errors, "what everstep raises on purpose"),
}


def text_of_all() -> dict[str, str]:
    """Return the text of each file, including the index."""
    made = {name: f"{MADE}\n\n# {title}\n\n{make().strip()}\n" for name, (title, make, _) in PAGES.items()}
    return {"README.md": _index(), **made}


def _index() -> str:
    rows = [(f"[{title}]({name})", says) for name, (title, _, says) in PAGES.items()]
    intro = "These pages are made from the tables in the code; `make docs` writes them, and a test compares them."
    return f"{MADE}\n\n# Reference\n\n{intro}\n\n{table(('page', 'lists'), rows)}\n"
