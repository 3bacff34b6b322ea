"""Lines about how processes ended: by a signal, by a launcher."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role, Weight
from everstep.model.finding import Owner

PROCESS_RULES = (
    LogRule(
        "fatal-python-error",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        (
            "fatal python error",
            "segmentation fault",
            "segfault at",
            "illegal instruction",
            "bus error",
            "sigsegv",
            "sigbus",
            "sigill",
            "sigfpe",
            "stack smashing",
            "double free",
            "corrupted size",
            "floating point exception",
        ),
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating)|Segmentation fault"
        r"|segfault at [0-9a-f]+"
        r"|traps: .* trap|Illegal instruction|Bus error|SIG(?:SEGV|BUS|ILL|FPE)\b|stack smashing detected"
        r"|double free or corruption"
        r"|Floating point exception",
        "Linux shells and kernel; Python's faulthandler; torchrun",
        (
            "Fatal Python error: Segmentation fault",
            "bash: line 1:  4242 Segmentation fault      (core dumped) python train.py",
            "  traceback : Signal 11 (SIGSEGV) received by PID 4242",
            "srun: error: node7: task 3: Bus error (core dumped)",
        ),
        ("segmentation model: fault tolerant",),
        role=Role.END,
    ),
    LogRule(
        "dataloader-worker-killed",
        FaultClass.KILLED,
        Owner.UNKNOWN,
        ("dataloader worker",),
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)",
        "torch.utils.data",
        (
            "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ",
            "RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly",
        ),
        ("DataLoader worker (pid 4242) is started",),
        role=Role.END,
    ),
    LogRule(
        "sigkill",
        FaultClass.KILLED,
        Owner.UNKNOWN,
        ("sigkill", "killed", "signal 9", "-9"),
        r"Signal 9 \(SIGKILL\) received by PID|\bSIGKILL\b|task \d+: Killed|^\s*Killed\s*$|line \d+:\s+\d+ Killed\s"
        r"|exited? (?:with|on) (?:code -9|signal 9)|exitcode\s*: -9\b|return code = -9\b|Exit Code:\s+137",
        "torchrun, mpirun, srun, bash: by whom it does not say",
        (
            "  traceback : Signal 9 (SIGKILL) received by PID 4242",
            "srun: error: node7: task 3: Killed",
            "Killed",
            "bash: line 1:  4242 Killed                  python train.py",
        ),
        ("killed 3 stale locks", "a skilled worker"),
        role=Role.END,
    ),
    LogRule(
        "sigabrt",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        ("terminate called", "sigabrt", "aborted", "fatal python error: aborted"),
        r"terminate called (?:after throwing|without an active)|SIGABRT|^\S*\s*Aborted(?:\s|$)"
        r"|: Aborted \(core dumped\)|Fatal Python error: Aborted",
        "C++ runtime; torchrun",
        (
            "terminate called after throwing an instance of 'c10::Error'",
            "  traceback : Signal 6 (SIGABRT) received by PID 42",
        ),
        ("the user aborted the dialog",),
        role=Role.END,
    ),
    LogRule(
        "sigterm",
        FaultClass.TERMINATED,
        Owner.UNKNOWN,
        ("sigterm", "signal: 15", "terminated", "signal 15"),
        r"Signal 15 \(SIGTERM\) received by PID|SignalException: Process \d+ got signal: 15|^\s*Terminated\s*$"
        r"|line \d+:\s+\d+ Terminated\s|task \d+: Terminated"
        r"|(?:[Rr]eceived|[Gg]ot|[Cc]aught)(?: the)? (?:signal )?SIGTERM",
        "torchrun, shells: by whom it does not say",
        (
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 15",
            "Terminated",
            "[rank0] got SIGTERM, saving",
        ),
        ("Sending process 4243 closing signal SIGTERM", "terminated normally"),
        role=Role.END,
    ),
    LogRule(
        "launcher-ends-the-others",
        FaultClass.TERMINATED,
        Owner.UNKNOWN,
        ("closing signal", "sending signal", "forcing job to terminate", "terminating worker"),
        r"[Ss]ending process \d+ closing signal|srun: .*Job step aborted|SendSignal|Terminating worker processes"
        r"|Unable to shutdown process \d+ via",
        "torchrun, srun",
        ("W1121 07:36:57 api.py:900] Sending process 4243 closing signal SIGTERM",),
        ("sending process list",),
        role=Role.SUMMARY,
        weight=Weight.WEAK,
    ),
    LogRule(
        "launcher-summary",
        FaultClass.UNKNOWN,
        Owner.UNKNOWN,
        (
            "childfailederror",
            "exited with exit code",
            "exits with return code",
            "exitcode",
            "root cause (first",
            "calledprocesserror",
            "crashloopbackoff",
            "processexitedexception",
            "processraisedexception",
            "job has failed",
        ),
        r"ChildFailedError|exits with return code = -?[1-9]|srun: error: .*Exited with exit code \d+"
        r"|failed \(exitcode: -?\d+\)"
        r"|Root Cause \(first observed failure\)"
        r"|subprocess\.CalledProcessError: Command .* returned non-zero|CrashLoopBackOff|ProcessExitedException"
        r"|ProcessRaisedException",
        "torchrun, srun, Kubernetes, deepspeed",
        (
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "srun: error: node7: task 3: Exited with exit code 1",
            "E1121 07:36:57 api.py:881] failed (exitcode: 1) local_rank: 3 (pid: 4242) of binary: /usr/bin/python",
        ),
        ("exited with exit code 0 as it should",),
        role=Role.SUMMARY,
        weight=Weight.WEAK,
    ),
    LogRule(
        "interrupted",
        FaultClass.INTERRUPTED,
        Owner.UNKNOWN,
        ("keyboardinterrupt", "sigint"),
        r"^\W*KeyboardInterrupt\b|Signal 2 \(SIGINT\)|SignalException: Process \d+ got signal: 2",
        "Python: SIGINT, of a person or of a scheduler",
        ("KeyboardInterrupt",),
        ("handling of KeyboardInterrupt is on",),
        role=Role.END,
    ),
)
"""The rules in the order in which they are tried."""
