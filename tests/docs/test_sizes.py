"""The tables of the page about sizes are what the plan computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.plan import Plan, plan_job
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.hardware import Hardware

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "sizes.md").read_text()
NODE = Hardware(shm_gb=1960)
HUGE = NODE.model_copy(update={"unmap_gb_s": 1000.0, "unpin_gb_s": 1000.0, "pin_gb_s": 25.0})
GB = 10**9


def plan(
    state_gb: int,
    *,
    slots: int = 3,
    backup_slots: int | None = 2,
    hash_threads: int = 1,
    hardware: Hardware = NODE,
    **settings: int,
) -> Plan:
    policy = CheckpointPolicy.model_validate(
        {"slots": slots, "backup": backup_slots is not None, "backup_slots": backup_slots or 2, **settings}
    )
    return plan_job(Load(state_gb * GB, 8, 16, 10.0, policy, hardware, hash_threads))


def table(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"][2:]


def test_the_table_of_memory() -> None:
    rows = table("Memory")
    assert len(rows) == 5
    for size, slots, backups, own, of_peers, total, fits in rows:
        memory = plan(
            int(size.split()[0]), slots=int(slots), backup_slots=None if backups == "off" else int(backups)
        ).memory
        assert [f"{value / GB:.0f} GB" for value in (memory.own, memory.backups, memory.total)] == [
            *(own, of_peers, total)
        ]
        assert (memory.total <= NODE.memory_bytes) is not fits.startswith("no")


def test_the_table_of_saves() -> None:
    found = {name: cells for name, *cells in table("Saves")}
    plans = [plan(size, hash_threads=threads) for size in (40, 80) for threads in (1, 4)]
    rows = {
        "copy from the GPU": [one.saves.copy_s for one in plans],
        "checksum": [one.saves.checksum_s for one in plans],
        "until the commit": [one.saves.save_s for one in plans],
        "first save of a job": [one.saves.first_s for one in plans],
        "delay by the first save": [one.saves.first_delay_s for one in plans],
    }
    assert {name: [f"{seconds:.1f} s" for seconds in values] for name, values in rows.items()} == {
        name: found[name] for name in rows
    }
    assert found["training waits"] == [f"{1000 * one.saves.delay_s:.1f} ms" for one in plans]


def test_the_table_of_a_restart() -> None:
    found = {name: cells for name, *cells in table("A restart after a rank died")}
    plans = [
        plan(40),
        plan(40, hash_threads=4),
        plan(40, hash_threads=4, hardware=HUGE),
        plan(80, hash_threads=4),
    ]
    assert [*found] == [*(part.name for part in plans[0].restart), "total"]
    for index, one in enumerate(plans):
        shown = {name: cells[index] for name, cells in found.items()}
        assert shown.pop("total") == f"{sum(part.seconds for part in one.restart):.1f} s"
        assert shown == {part.name: f"{part.seconds:.1f} s" for part in one.restart}


def test_the_traffic() -> None:
    one_card = NODE.model_copy(update={"cards": 1})
    one, many = plan(40, hardware=one_card, transfer_connections=1).backups, plan(40).backups
    assert one is not None
    assert many is not None
    assert (f"{one.seconds:.0f}", one.every_steps, f"{one.management_s:.0f}") == ("119", 12, "256")
    assert (f"{many.seconds:.1f}", many.every_steps, f"{many.cores:.0f}") == ("3.7", 1, "20")
    assert many.card_share == pytest.approx(0.08, abs=0.005)
