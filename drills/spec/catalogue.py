"""The vocabulary of faults: what exists, what each does, and what cannot be injected yet."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from everstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One fault of the vocabulary."""

    name: str
    options: str
    summary: str
    """What really happens, one line."""
    not_soaked: str = ""
    """Why no soak draws it; empty: soaks do."""
    draws: tuple[str, ...] = ()
    """Options that a soak draws for it, see ``drills/soak/draw.py``."""
    least: int = 1
    """Machines that a soak's job needs for it: so many say what is right, or which of them work with each other."""
    alike: bool = False
    """A soak's job for it has one rank on each machine, and all do the same: neighbours need each other at once."""


_TAKES_LONG = "takes two minutes, of which a job needs one to know its own pace: the wide drills have it"

CATALOGUE: tuple[FaultKind, ...] = (
    FaultKind(
        "kill-rank",
        "--rank R … [--signal KILL|SEGV|ABRT]",
        "a rank gets the signal; several at once",
        draws=("ranks", "signal"),
    ),
    FaultKind("stop-rank", "--rank R", "SIGSTOP: the rank stands still and its peers wait", draws=("rank",)),
    FaultKind(
        "exit-rank", "--rank R [--code C]", "os._exit(C) in the middle of a step, 0 included", draws=("rank", "code")
    ),
    FaultKind("raise", "--rank R [--exception NAME]", "a Python exception in user code", draws=("rank", "exception")),
    FaultKind("spin", "--rank R …", "a loop without end holds Python's lock", draws=("rank",)),
    FaultKind("deadlock", "--rank R …", "a lock is never released", draws=("rank",)),
    FaultKind("skip-collective", "--rank R …", "a collective is not entered", draws=("rank",)),
    FaultKind("hang-dataloader", "--rank R …", "the process of a data loader waits for ever", draws=("rank",)),
    FaultKind(
        "wrong-order",
        "",
        "odd ranks call two collectives in another order than even ones: the script's fault, and of no machine",
        not_soaked="all ranks act in it at once, which no second fault can strike between",
    ),
    FaultKind(
        "nan",
        "--rank R | --machine M",
        "NaN in a rank's forward pass; bound to a machine it comes again there at that step",
        draws=("rank",),
    ),
    FaultKind(
        "bitflip",
        "--machine M [--only-in-job [--shows-every N]] [--finite]",
        "one bit of a gradient flips on that machine, in the job from a step on and in every test, or in no test; it "
        "makes numbers infinite, or with --finite only wrong, for which a check on another machine aborts the job",
        draws=("machine", "bits"),
        least=4,
    ),
    FaultKind(
        "slow-machine",
        "--machine M [--factor F]",
        "a machine's ranks have a share of the CPU time that they had, in a group of processes of their own: "
        "half of it unless --factor says otherwise",
        not_soaked=_TAKES_LONG,
    ),
    FaultKind(
        "uneven-work",
        "--rank R [--factor F]",
        "a rank has more to do than the others from the first step on, and all have more from a step on: of no machine",
        not_soaked=_TAKES_LONG,
    ),
    FaultKind(
        "kill-machine",
        "--machine M [--gone [--standby sick|dies|late]]",
        "SIGKILL of everything of a machine, which comes back empty, or not at all",
        draws=("machine", "gone"),
    ),
    FaultKind(
        "kill-group",
        "--kind AXIS --index I [--gone]",
        "the same to all machines of a parallel group at once",
        draws=("group", "gone"),
    ),
    FaultKind(
        "kill-agent",
        "--machine M [--during launch | --then FAULT | --gone]",
        "SIGKILL of a node agent; its ranks live on. With --then a rank or the machine is killed once it is back; with "
        "--gone it stays away for longer than a silent machine is waited for",
        draws=("machine", "launch or then"),
    ),
    FaultKind(
        "kill-forkserver", "--machine M", "SIGKILL of a job's fork server; its ranks live on", draws=("machine",)
    ),
    FaultKind(
        "kill-worker",
        "--in-stage STAGE [--during FAULT …] [--moment begin|middle|end]",
        "SIGKILL of the worker that works on that stage of an incident",
        draws=("stage",),
    ),
    FaultKind(
        "kill-temporal",
        "--in-stage STAGE [--during FAULT …] [--moment begin|middle|end]",
        "SIGKILL of the Temporal server in that stage of an incident",
        draws=("stage",),
    ),
    FaultKind("kill-during-save", "--rank R", "SIGKILL in the middle of a checkpoint write", draws=("rank",)),
    FaultKind(
        "xid",
        "--machine M [--code N] [--everywhere] [--then kill-rank]",
        "the kernel's line about a GPU error, through /dev/kmsg, on one machine or on all; the job goes on unless a "
        "rank is killed with it",
        draws=("machine", "xid"),
    ),
    FaultKind(
        "gpu-lost",
        "--machine M [--then kill-rank]",
        "a GPU is lost, of fake ones that the machine's agent reads",
        draws=("machine",),
    ),
    FaultKind(
        "machine-fault",
        "--machine M --reason CODE [--everywhere]",
        "any fault that names its machine for sure: a line of the kernel, or a fake GPU",
        draws=("machine", "reason"),
    ),
    FaultKind(
        "gpu-hot",
        "--machine M",
        "a GPU is too hot, of fake ones that the machine's agent reads",
        draws=("machine",),
    ),
    FaultKind(
        "nic-down",
        "--machine M",
        "a machine's second network card has no link, in network namespaces",
        draws=("machine",),
    ),
    FaultKind(
        "nic-flap",
        "--machine M",
        "the link of a machine's second network card goes down and comes back",
        draws=("machine",),
    ),
    FaultKind(
        "switch-down",
        "",
        "the second network cards of all machines have no link at once, as when their switch fails",
    ),
    FaultKind(
        "disk-full",
        "--machine M",
        "no space for checkpoints on a machine's disk; then memory is lost",
        draws=("machine",),
    ),
    FaultKind(
        "fs-readonly",
        "--machine M",
        "the file system of a machine's disk checkpoints turns read-only",
        draws=("machine",),
    ),
    FaultKind(
        "oom",
        "--rank R",
        "a rank takes memory until the kernel kills it, in a group of processes of its own",
        draws=("rank",),
    ),
    FaultKind(
        "link-down",
        "--machine M [--seconds S]",
        "a machine's link is down: it reaches nobody",
        draws=("machine", "link down"),
    ),
    FaultKind(
        "cut-off",
        "--machine M [--from control] [--seconds S]",
        "a machine and the control host do not reach each other; other machines reach it",
        draws=("machine", "away"),
    ),
    FaultKind(
        "kill-postgres",
        "[--seconds S] [--rank R]",
        "SIGKILL of the ledger's server, then of a rank; the server stays away until the job steps again",
        draws=("rank", "away"),
    ),
    FaultKind(
        "kill-workers",
        "[--seconds S] [--rank R]",
        "SIGKILL of all workers, then of a rank; then they come back",
        draws=("rank", "away"),
    ),
    FaultKind(
        "cut-link",
        "--between M1 M2",
        "no packet passes between two machines until one of them left the job",
        draws=("machine",),
        least=4,
        alike=True,
    ),
    FaultKind(
        "slow-link",
        "--between M1 M2 [--factor F]",
        "few bytes a second pass between two machines, in network namespaces",
        not_soaked=_TAKES_LONG,
    ),
    FaultKind(
        "bad-version",
        "--at-start | --fails-after N | --changes-state",
        "a hot update whose code fails: at its import, after some steps, or in its restore",
        draws=("bad version",),
    ),
    FaultKind(
        "update",
        "[--lazy [--then FAULT | --window S]] [--during WHAT]",
        "a hot update of the code, asked for three times by the same signal",
        draws=("update",),
    ),
    FaultKind(
        "flip-bit",
        "--where buffer|backup|file [--rank R]",
        "one bit of a rank's saved state flips, and what holds the better copies is killed",
        draws=("rank", "where"),
    ),
    FaultKind(
        "truncate-file",
        "[--rank R]",
        "a rank's newest checkpoint on disk is cut short, and then needed",
        draws=("rank",),
    ),
    FaultKind(
        "shm-full",
        "--machine M [--fits nothing|own]",
        "shared memory too small for the machine's own checkpoints, or for the backups that others send",
        draws=("machine", "fits"),
    ),
    FaultKind(
        "hang-peer",
        "--machine M [--seconds S]",
        "SIGSTOP of an agent while it receives backups",
        draws=("machine", "seconds"),
    ),
    FaultKind(
        "hang-agents",
        "--count N [--seconds S] [--rank R]",
        "SIGSTOP of the agents of several machines at once, then SIGKILL of a rank of another one; then they go on",
        not_soaked="needs more machines than a soak's job has, for the breaker to be asked",
    ),
    FaultKind(
        "kill-peer",
        "--machine M [--then FAULT]",
        "SIGKILL of an agent in the middle of a backup; once it is back, the owner's machine or rank is killed",
        draws=("machine", "then"),
    ),
)

HANGS = ("stop-rank", "spin", "deadlock", "skip-collective", "hang-dataloader")
"""After which the others wait for a rank: its machine leaves the job, where there is another one."""
RANK_FAULTS = (
    "kill-rank",
    "exit-rank",
    "raise",
    "kill-during-save",
    "nan",
    "bitflip",
    "oom",
    *HANGS,
    "wrong-order",
)
"""Acted out by the rank itself, at a step."""
MACHINE_FAULTS = ("kill-agent", "kill-forkserver")
"""Done from outside to a process beside the ranks."""
CONTROL_FAULTS = ("kill-worker", "kill-temporal")
"""Done in a stage of the incident that another fault opened."""
LOSSES = ("kill-machine", "kill-group")
"""Machines are killed and come back empty."""
DAMAGE = ("flip-bit", "truncate-file")
"""A copy is damaged, then it is needed."""
ROOM = ("shm-full", "disk-full")
"""A file system of a machine is too small."""
UPDATES = ("update", "bad-version")
"""Other code for the job, asked for by a signal."""
AWAY = ("link-down", "cut-off", "cut-link", "kill-postgres", "kill-workers")
"""Something is away for some seconds, on machines that have a network of their own."""
DEVICES = ("xid", "gpu-lost", "machine-fault", "gpu-hot", "nic-down", "nic-flap", "switch-down", "fs-readonly")
"""A device of a machine breaks, and inspections find it; the job goes on, unless the drill kills a rank with it."""
NOT_FINITE = ("nan", "bitflip")
"""Faults that show as a loss, or a gradient norm, that is not finite."""
SLOWED = ("slow-machine", "uneven-work", "slow-link")
"""Steps go on, and take longer: whoever looks for the slow machine has to find it, or to say that there is none."""
OWN_JOBS = (*ROOM, *DEVICES, *NOT_FINITE, "oom", "cut-link")
"""A soak runs these in jobs of their own: file systems and groups of processes have to be small from the job's
beginning, devices are whole again before the next job, the reports of a NaN differ until it is seen, and machines are
tested with the settings of a drill."""
CARDS = ("nic-down", "nic-flap", "switch-down")
"""Of them those of network cards."""
THEN = ("kill-rank", "kill-machine")
"""What may follow, once a killed agent is back."""
WHERE = ("buffer", "backup", "file")
"""Where a bit flips: in a rank's own memory, in its backup at the peer, on disk."""
SHARED = ("xid", "machine-fault")
"""Of the devices those that may break on all machines at once."""
STANDBY = ("sick", "dies", "late")
"""What is wrong with the machine that is to take the place of a lost one: an inspection finds it faulty, it is lost
while it is made ready, or none is there until the job waits for it."""
FITS = ("nothing", "own")
"""What a machine's shared memory has room for."""

_BY_NAME = {kind.name: kind for kind in CATALOGUE}


def kind_of(name: str) -> FaultKind:
    """The fault of a name.

    Raises:
        ConfigError: there is none.
    """
    kind = _BY_NAME.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see 'everstep drill --list'"
        raise ConfigError(f"no fault is called {name!r}: {hint}")
    return kind
