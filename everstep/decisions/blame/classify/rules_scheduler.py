"""Rules for lines that schedulers and container runtimes write."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Weight
from everstep.model.finding import Owner

SLURM = "Slurm: slurmstepd, srun, sacct states"
KUBERNETES = "Kubernetes: reasons of pods and events"

SCHEDULER_RULES = (
    LogRule(
        "scheduler-time-limit",
        FaultClass.TIME_LIMIT,
        Owner.SCHEDULER,
        hints="due to time limit|deadlineexceeded|wall time|walltime",
        pattern=(
            r"CANCELLED AT .*DUE TO TIME LIMIT|\bDeadlineExceeded\b.*(?:[Jj]ob|[Pp]od)|(?:[Jj]ob"
            r"|[Pp]od).*\bDeadlineExceeded\b|job killed: walltime .* exceeded|TERM_RUNLIMIT"
        ),
        source=SLURM + "; " + KUBERNETES + "; PBS; LSF",
        matches=(
            "slurmstepd: error: *** JOB 4242 ON node7 CANCELLED AT 2026-11-21T07:36:56 DUE TO TIME LIMIT ***",
            "Warning  DeadlineExceeded  job-controller  Job was active longer than specified deadline",
        ),
        misses=("due to time limits of the talk",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "scheduler-preempted",
        FaultClass.PREEMPTED,
        Owner.SCHEDULER,
        hints="due to preemption|preempt|spot|interruption notice|instance-action",
        pattern=(
            r"DUE TO PREEMPTION|\bPreempted by\b|Preempted in order to admit|reason:?\s+Preempt(?:ed|ing)\b"
            r"|\bjob (?:is|was|has been) preempted|node was preempted|requeued due to preemption|JobState=PREEMPTED"
            r"|node drain for spot|\bPREEMPTED\s+\d+:\d+\s*$"
            r"|[Pp]reemption [Nn]otice|spot (?:instance )?interruption|[Ss]tate[:=]\s*PREEMPTED|instance (?:was"
            "|is being) preempted|PreemptionByScheduler"
        ),
        source=SLURM + "; " + KUBERNETES + "; clouds; submitit; Ray",
        matches=(
            "slurmstepd: error: *** STEP 4242.0 ON node7 CANCELLED AT 2026-11-21T07:36:56 DUE TO PREEMPTION ***",
            "Normal  Preempted  default-scheduler  Preempted by pod 1b2c on node node7",
            "EC2 spot instance interruption notice received, 120 s left",
            "\tthe actor's node was preempted: node drain for spot reclaim",
            "submitit WARNING - Caught signal SIGUSR2 on node7: this job is preempted.",
            "4242.batch  batch  team  64  PREEMPTED  0:0",
        ),
        misses=("preemption is off", "spot price 3", "the task handles PREEMPTED states well: yes", "preempted 0 jobs"),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "ray-node-terminated",
        FaultClass.EVICTED,
        Owner.SCHEDULER,
        hints="will be terminated soon",
        pattern=r"\(autoscaler [^)]*\) Instance \S+ .*will be terminated soon \(reason: (?!idle|unused|max|user)",
        source="Ray: the autoscaler; the end of a node that is idle, or not wanted any more, explains no failure",
        matches=(
            "(autoscaler +44m27s) Instance k-1a5e0001 (node IP: 10.2.140.199) will be terminated soon "
            "(reason: kubernetes-pod-termination).",
        ),
        misses=(
            "(autoscaler +9m2s) Instance k-1a5e0001 (node IP: 10.2.140.199) will be terminated soon "
            "(reason: idle-termination).",
            "RuntimeError: worker 3 will be terminated soon (reason: bad reward)",
            "(autoscaler +9m2s) Removing 1 nodes of type gpu (idle).",
        ),
    ),
    LogRule(
        "node-failed",
        FaultClass.NODE_FAILED,
        Owner.MACHINE,
        hints="due to node fail|node failure|nodelost|nodenotready|node_fail|is not responding",
        pattern=(
            r"DUE TO NODE FAIL|\bNODE_FAIL\b|\bNodeLost\b|NodeNotReady|error: Node failure on|TaintManagerEviction"
            r"|nodes? \S+ (?:is )?not responding"
        ),
        source=SLURM + "; " + KUBERNETES,
        matches=(
            "srun: error: Node failure on node7",
            "slurmstepd: error: *** JOB 4242 ON node7 CANCELLED AT 2026-11-21T07:36:56 DUE TO NODE FAILURE, SEE "
            "SLURMCTLD LOG FOR DETAILS ***",
            "Warning  NodeNotReady  node-controller  Node is not ready",
        ),
        misses=("node failures: 0",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "evicted",
        FaultClass.EVICTED,
        Owner.SCHEDULER,
        hints="evicted|evicting|low on resource|ephemeral local storage|had condition|node shutdown|is shutting down",
        pattern=(
            r"(?-i:\bEvicted\b)|[Tt]he node was low on resource|Pod ephemeral local storage usage exceeds"
            r"|The node had condition: \[|in response to imminent node shutdown|rejected as the node is shutting down"
        ),
        source=KUBERNETES,
        matches=(
            "Warning  Evicted  kubelet  The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi",
            "Message:      Pod was terminated in response to imminent node shutdown.",
        ),
        misses=("evicting 3 keys from the cache", "cache: evicted 3 entries"),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "container-start",
        FaultClass.CONTAINER,
        Owner.SCHEDULER,
        hints=(
            "imagepullbackoff|errimagepull|failed to pull image|oci runtime|createcontainer|runcontainererror"
            "|invalidimagename|failed to create|containercannotrun|failed to start container|pyxis|enroot"
        ),
        pattern=(
            "^(?!.*nvml error: driver).*?(?:ImagePullBackOff|ErrImagePull|Failed to pull image"
            "|OCI runtime (?:create|exec) failed"
            "|CreateContainer(?:Config)?Error|RunContainerError|InvalidImageName|ContainerCannotRun"
            "|[Ff]ailed to create (?:containerd task|shim|pod sandbox)|failed to start container|pyxis: (?:couldn't"
            r"|failed|container start)|enroot.*\[ERROR\])"
        ),
        source=KUBERNETES + "; runc, containerd, pyxis, enroot",
        matches=(
            'Warning  Failed  kubelet  Failed to pull image "registry.example/train:7": not found',
            "gpt-0  0/1  ImagePullBackOff  0  3m",
            "docker: Error response from daemon: OCI runtime create failed: runc create failed: unable to start "
            "container process",
            "pyxis: couldn't start container",
        ),
        misses=(
            "image pulled in 3 s",
            "OCI runtime create failed: nvidia-container-cli: nvml error: driver/library version mismatch: unknown",
        ),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "scheduler-cancelled",
        FaultClass.CANCELLED,
        Owner.SCHEDULER,
        hints="cancelled at|cancelled by|force terminated job|job cancelled",
        pattern=r"CANCELLED AT \d|CANCELLED by \d+|[Ff]orce [Tt]erminated job(?! step)",
        source=SLURM + "; the line does not show who cancelled the job",
        matches=("slurmstepd: error: *** STEP 4242.0 ON node7 CANCELLED AT 2026-11-21T07:36:56 ***",),
        misses=("the meeting was cancelled at noon", "srun: Force Terminated job step 2594.1"),
        weight=Weight.DECISIVE,
    ),
)
