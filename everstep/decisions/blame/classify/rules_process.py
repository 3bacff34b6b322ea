"""Rules for lines about how processes ended: by a signal or by a launcher."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role, Weight
from everstep.model.finding import Owner

RAY_RULES = (
    LogRule(
        "ray-node-died",
        FaultClass.NODE_FAILED,
        Owner.UNKNOWN,
        hints="node has died|marked dead",
        pattern=r"(?:died|is dead) because its node has died|node with (?:node id|client ID).* has been marked dead",
        source="Ray; the node may have failed, lost its network, or been taken away",
        matches=(
            "The actor died because its node has died. Node Id: b157c93de9603b1458ae4bd22668b46a",
            "The node with node id: 8f205b12643d and ip: 10.128.0.47 has been marked dead because the detector has "
            "missed too many heartbeats from it.",
        ),
        misses=("the node is marked as idle",),
        role=Role.END,
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "ray-placement-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="placement group",
        pattern=(
            r"Failed to create placement group with \d+ bundles .* in \d+ seconds|Placement group creation timed out"
            r"|Cannot provide a placement group of .* within \d+ seconds"
        ),
        source="Ray, SkyRL, vLLM: the cluster has too few resources, or has lost them",
        matches=(
            "RuntimeError: Failed to create placement group with 1 bundles (requiring 2.0 GPUs, 1.0 CPUs total) in 180 "
            "seconds.",
            "TimeoutError: Placement group creation timed out. Make sure your cluster either has enough resources or "
            "use an autoscaling cluster.",
        ),
        misses=("ValueError: a placement group needs at least one bundle", "placement group created in 3 seconds"),
        role=Role.WAIT,
    ),
    LogRule(
        "ray-worker-died",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        hints="worker exit type|worker died or was killed|worker process has died|crashed unexpectedly",
        pattern=(
            "worker process has died|[Ww]orker (?:died or was killed|exit type: SYSTEM_ERROR)|Worker unexpectedly exits"
            "|WorkerCrashedError: The worker died unexpectedly"
        ),
        source="Ray; the line lists possible reasons, and does not show which it was",
        matches=(
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. There are "
            "some potential root causes. "
            "(1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
        ),
        misses=("the worker exits as it should",),
        role=Role.END,
    ),
    LogRule(
        "ray-actor-died",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        hints="actordiederror|rayactorerror|actor died unexpectedly",
        pattern="ActorDiedError|RayActorError|[Aa]ctor died unexpectedly",
        source="Ray; the reason is in a further line of the message",
        matches=("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",),
        misses=("the actor died in the film",),
        role=Role.END,
        vague=True,
    ),
)
PROCESS_RULES = (
    LogRule(
        "fatal-python-error",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        hints=(
            "fatal python error|segmentation fault|segfault at|illegal instruction|bus error|sigsegv|sigbus|sigill"
            "|sigfpe|exitcode: -|stack smashing|double free|corrupted size|floating point exception"
        ),
        pattern=(
            "Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating)|Segmentation fault"
            r"|segfault at [0-9a-f]+|traps: .* trap|Illegal instruction|(?<!PCIe )Bus error|SIG(?:SEGV|BUS|ILL|FPE)\b"
            r"|\(exitcode: -(?:4|7|8|11)\)|stack smashing detected|double free or corruption|Floating point exception"
        ),
        source="Linux shells and kernel; Python's faulthandler; torchrun",
        matches=(
            "Fatal Python error: Segmentation fault",
            "bash: line 1:  4242 Segmentation fault      (core dumped) python train.py",
            "  traceback : Signal 11 (SIGSEGV) received by PID 4242",
            "srun: error: node7: task 3: Bus error (core dumped)",
            "E1121 08:41:02 api.py:833] failed (exitcode: -8) local_rank: 0 (pid: 69053) of "
            "binary: /opt/env/bin/python",
        ),
        misses=(
            "segmentation model: fault tolerant",
            "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)",
        ),
        role=Role.END,
    ),
    LogRule(
        "dataloader-worker-killed",
        FaultClass.KILLED,
        Owner.UNKNOWN,
        hints="dataloader worker",
        pattern=r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)",
        source="torch.utils.data",
        matches=(
            "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ",
            "RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly",
        ),
        misses=("DataLoader worker (pid 4242) is started",),
        role=Role.END,
    ),
    LogRule(
        "sigkill",
        FaultClass.KILLED,
        Owner.UNKNOWN,
        hints="sigkill|killed|signal 9|-9",
        pattern=(
            r"Signal 9 \(SIGKILL\) received by PID|\bSIGKILL\b|task \d+: Killed|^\s*Killed\s*$"
            r"|line \d+:\s+\d+ Killed\s|exited? (?:with|on) (?:code -9|signal 9)|exitcode\s*: -9\b|return code = -9\b"
            r"|Exit Code:\s+137"
        ),
        source="torchrun, mpirun, srun, bash; the line does not show who sent the signal",
        matches=(
            "  traceback : Signal 9 (SIGKILL) received by PID 4242",
            "srun: error: node7: task 3: Killed",
            "Killed",
            "bash: line 1:  4242 Killed                  python train.py",
        ),
        misses=("killed 3 stale locks", "a skilled worker"),
        role=Role.END,
    ),
    LogRule(
        "uncaught-cpp-exception",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        hints="terminate called",
        pattern="terminate called (?:after throwing|without an active|recursively)",
        source="C++ runtime; the message of the exception is in the next line, after what()",
        matches=(
            "terminate called after throwing an instance of 'c10::Error'",
            "terminate called after throwing an instance of 'std::runtime_error'",
        ),
        misses=("terminate called twice",),
        role=Role.END,
    ),
    LogRule(
        "sigabrt",
        FaultClass.CRASHED,
        Owner.UNKNOWN,
        hints="sigabrt|aborted|exitcode: -6|fatal python error: aborted",
        pattern=(
            r"SIGABRT|\(exitcode: -6\)|^\S*\s*Aborted(?:\s|$)"
            r"|: Aborted \(core dumped\)|Fatal Python error: Aborted"
        ),
        source="C++ runtime; torchrun",
        matches=("  traceback : Signal 6 (SIGABRT) received by PID 42", "Fatal Python error: Aborted"),
        misses=("the user aborted the dialog",),
        role=Role.END,
    ),
    LogRule(
        "sigterm",
        FaultClass.TERMINATED,
        Owner.UNKNOWN,
        hints="sigterm|signal: 15|terminated|signal 15",
        pattern=(
            r"Signal 15 \(SIGTERM\) received by PID|SignalException: Process \d+ got signal: 15|^\s*Terminated\s*$"
            r"|line \d+:\s+\d+ Terminated\s|task \d+: Terminated|(?:[Rr]eceived|[Gg]ot"
            "|[Cc]aught)(?: the)? (?:signal )?SIGTERM"
        ),
        source="torchrun, shells; the line does not show who sent the signal",
        matches=(
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4242 got signal: 15",
            "Terminated",
            "[rank0] got SIGTERM, saving",
        ),
        misses=("Sending process 4243 closing signal SIGTERM", "terminated normally"),
        role=Role.END,
    ),
    LogRule(
        "launcher-ends-the-others",
        FaultClass.TERMINATED,
        Owner.UNKNOWN,
        hints="closing signal|sending signal|forcing job to terminate|terminating worker",
        pattern=(
            r"[Ss]ending process \d+ closing signal|srun: .*Job step aborted|SendSignal|Terminating worker processes"
            r"|Unable to shutdown process \d+ via"
        ),
        source="torchrun, srun",
        matches=("W1121 07:36:57 api.py:900] Sending process 4243 closing signal SIGTERM",),
        misses=("sending process list",),
        role=Role.SUMMARY,
        weight=Weight.WEAK,
    ),
    LogRule(
        "launcher-summary",
        FaultClass.UNKNOWN,
        Owner.UNKNOWN,
        hints=(
            "childfailederror|exited with exit code|exits with return code|exitcode|root cause (first"
            "|calledprocesserror|crashloopbackoff|processexitedexception|processraisedexception|job has failed"
        ),
        pattern=(
            r"ChildFailedError|exits with return code = -?[1-9]|srun: error: .*Exited with exit code \d+"
            r"|failed \(exitcode: -?\d+\)|Root Cause \(first observed failure\)"
            r"|subprocess\.CalledProcessError: Command .* returned non-zero|CrashLoopBackOff|ProcessExitedException"
            "|ProcessRaisedException"
        ),
        source="torchrun, srun, Kubernetes, deepspeed",
        matches=(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "srun: error: node7: task 3: Exited with exit code 1",
            "E1121 07:36:57 api.py:881] failed (exitcode: 1) local_rank: 3 (pid: 4242) of binary: /usr/bin/python",
        ),
        misses=("exited with exit code 0 as it should",),
        role=Role.SUMMARY,
        weight=Weight.WEAK,
    ),
    LogRule(
        "interrupted",
        FaultClass.INTERRUPTED,
        Owner.UNKNOWN,
        hints="keyboardinterrupt|sigint",
        pattern=r"^\W*KeyboardInterrupt\b|Signal 2 \(SIGINT\)|SignalException: Process \d+ got signal: 2",
        source="Python: SIGINT from a person or a scheduler",
        matches=("KeyboardInterrupt",),
        misses=("handling of KeyboardInterrupt is on",),
        role=Role.END,
    ),
)
