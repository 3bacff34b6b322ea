"""Shows the plan of a job: a table for people, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from console.terminal import aligned
from controlplane.text import DASH, counted, duration
from everstep.base.text import size_text
from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.plan import Plan
from everstep.decisions.sizing.restart import RestartPart
from everstep.decisions.sizing.traffic import FilePlan
from everstep.model.hardware import Hardware
from everstep.slots.footprint import footprint

Row = tuple[str, ...]


def plan_lines(load: Load, plan: Plan, sources: Mapping[str, str]) -> list[str]:
    """The plan as lines: memory, saves, traffic, restarts, and the numbers from which it was computed."""
    blocks: list[tuple[str, Sequence[Row]]] = [
        ("memory of a machine", _memory(load, plan)),
        ("saves, of all ranks at once", _saves(load, plan)),
        ("traffic of a machine", _traffic(load, plan)),
        ("restart after a rank died", _parts(plan.restart)),
        ("restart after a machine was lost", _parts(plan.replacement)),
        ("computed from", _numbers(load, sources)),
    ]
    lines = [
        f"{size_text(load.state_bytes)} of state in each rank, {counted(load.ranks, 'rank')} on each of "
        f"{counted(load.machines, 'machine')}, steps of {load.step_s:g} s"
    ]
    for title, rows in blocks:
        if rows:
            lines += ["", title, *aligned(rows, "  ")]
    return lines


def plan_json(load: Load, plan: Plan, sources: Mapping[str, str]) -> dict[str, Any]:
    """The plan with everything from which it was computed; sizes in bytes, times in seconds."""
    own = asdict(plan)
    own["memory"] |= {"total": plan.memory.total}
    own["totals"] = {"restart": _total(plan.restart), "replacement": _total(plan.replacement) or None}
    return {
        "state_bytes": load.state_bytes,
        "ranks_per_machine": load.ranks,
        "machines": load.machines,
        "step_s": load.step_s,
        "forward_share": load.forward_share,
        "checkpoint": load.policy.model_dump(),
        "hardware": load.hardware.model_dump(),
        "hash_threads": load.hash_threads,
        "sources": dict(sources),
        **own,
    }


def _memory(load: Load, plan: Plan) -> list[Row]:
    memory, hardware = plan.memory, load.hardware
    has = f"memory {size_text(hardware.memory_bytes)}, /dev/shm {size_text(hardware.shm_bytes)}"
    rows: list[Row] = [
        ("own slots", size_text(memory.own), f"{load.ranks} x {memory.slots} slots"),
        ("backups", size_text(memory.backups), f"{load.ranks} x {memory.backup_slots} slots"),
        ("total", size_text(memory.total), f"{'does not fit' if plan.refusal else 'fits'}: {has}"),
    ]
    if not plan.refusal:
        return rows
    if plan.most_slots is None:
        most = "not even 2 slots without backups: shard the state over more ranks, or use fewer ranks on a machine"
    else:
        slots, backup_slots = plan.most_slots
        with_backups = f"backup_slots = {backup_slots}" if backup_slots else "backup = false"
        most = f"slots = {slots}, {with_backups}"
        if memory.total > hardware.shm_bytes:
            needed = footprint(load.state_bytes, load.ranks, slots, backup_slots).total
            most += f", and a larger /dev/shm (mount -o remount,size={-(-needed // (1 << 30))}G /dev/shm)"
    return [*rows, ("what fits", "", most)]


def _saves(load: Load, plan: Plan) -> list[Row]:
    saves = plan.saves
    if saves.fits_step:
        fit = _every(saves.every_steps), "and no step waits for a save"
    elif not load.policy.overlap or load.policy.slots < 3:
        fit = _every(saves.every_steps), "training waits for each save, since nothing overlaps (overlap, slots)"
    else:
        waits = f"training waits {_time(saves.delay_s)} for each save, so a step takes {_time(saves.step_s)} on average"
        fit = _every(saves.every_steps), waits
    copied = f"{load.state_bytes / saves.copy_s / 1e9:.1f} GB/s, {'from the GPU' if load.on_gpu else 'by one thread'}"
    threads = counted(load.hash_threads, "thread")
    return [
        ("training waits", _time(saves.delay_s), f"of it the script's thread {_time(saves.script_s)}"),
        ("copy", _time(saves.copy_s), copied),
        ("checksum", _time(saves.checksum_s), f"{load.hash_rate / 1e9:.1f} GB/s, {threads}"),
        ("save", _time(saves.save_s), "until it is committed"),
        ("saved", *fit),
        ("first save", _time(saves.first_s), f"allocates its slot; training waits {_time(saves.first_delay_s)}"),
    ]


def _traffic(load: Load, plan: Plan) -> list[Row]:
    rows: list[Row] = []
    if backups := plan.backups:
        every = _every(backups.every_steps)
        limited = f"{size_text(backups.bytes)} at {backups.rate / 1e9:.1f} GB/s, limited by {backups.bound_by}"
        rate = f"{every}, {backups.per_second:.3g} a second; {100 * backups.card_share:.0f} % of the cards in use"
        rows += [
            ("backup of a step", _time(backups.seconds), limited),
            ("backed up", "", f"{rate}; {backups.cores:.1f} cores"),
        ]
        if backups.management_s:
            cards = f"if the agents' address is on the card of {load.hardware.management_gbit_s:g} Gbit/s"
            rows.append(("  over management", _time(backups.management_s), cards))
    else:
        rows.append(("backups", DASH, "none"))
    rows += _files("disk", plan.disk, "free on each machine")
    return rows + _files("remote storage", plan.remote, "free there, for all machines")


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _files(name: str, files: FilePlan | None, where: str) -> list[Row]:
    if files is None:
        return [(name, DASH, "nothing is written")]
    late = "" if files.fits else "; it is slower than steps become due"
    return [
        (
            name,
            _time(files.seconds),
            f"{size_text(files.bytes)} every {duration(files.every_s)}{late}; {size_text(files.mean_rate)}/s on "
            f"average; {size_text(files.space)} {where}",
        )
    ]


def _parts(parts: Sequence[RestartPart]) -> list[Row]:
    rows = [(part.name, _time(part.seconds), part.what) for part in parts]
    return [*rows, ("total", _time(_total(parts)), "")] if rows else []


def _total(parts: Sequence[RestartPart]) -> float:
    return sum(part.seconds for part in parts)


def _numbers(load: Load, sources: Mapping[str, str]) -> list[Row]:
    return [(name, f"{getattr(load.hardware, name):.4g}", sources[name]) for name in Hardware.model_fields]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else duration(seconds)
