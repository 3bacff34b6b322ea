"""Rules for lines about a machine's memory, processors and limits."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import KERNEL, FaultClass, LogRule, Weight
from everstep.model.finding import Owner

HOST_RULES = (
    LogRule(
        "kernel-panic",
        FaultClass.KERNEL_PANIC,
        Owner.MACHINE,
        hints="kernel panic|machine check|mce:|hardware error",
        pattern=r"Kernel panic - not syncing|mce: \[Hardware Error\]|Machine check: Processor context corrupt",
        source=KERNEL,
        matches=(
            "Kernel panic - not syncing: Fatal exception in interrupt",
            "mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7",
        ),
        misses=("no reason to panic: kernel 3x3",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "oom-kill-of-the-job",
        FaultClass.HOST_OUT_OF_MEMORY,
        Owner.CODE,
        hints=(
            "oom_kill|oomkilled|oom-kill|memory cgroup out of memory|out-of-memory|exceeded memory limit|oom killer"
            "|term_memlimit"
        ),
        pattern=(
            r"Detected \d+ oom[_-]kill event|\bOOMKilled\b(?!: false)|OUT_OF_MEMORY\b.*(?:slurm|job)"
            "|Memory cgroup out of memory|oom-kill:constraint=CONSTRAINT_MEMCG|exceeded (?:step |job )?memory limit"
            "|TERM_MEMLIMIT|Some of (?:your processes"
            "|the step tasks) (?:may )?have been (?:killed by the cgroup out-of-memory handler|OOM Killed)"
        ),
        source="Slurm; Kubernetes; Linux kernel: the limit of the job's own cgroup",
        matches=(
            "slurmstepd: error: Detected 1 oom_kill event in StepId=4242.0. Some of the step tasks have been OOM "
            "Killed.",
            "Memory cgroup out of memory: Killed process 4242 (python) total-vm:81234kB, anon-rss:70000kB",
            "    Last State:     Terminated  Reason:       OOMKilled",
        ),
        misses=("oom_kill 0", "OOMKilled: false"),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "oom-kill",
        FaultClass.HOST_OUT_OF_MEMORY,
        Owner.UNKNOWN,
        hints="oom-killer|out of memory: kill|oom-kill:|memory pressure|ray.exceptions.outofmemory",
        pattern=(
            r"invoked oom-killer|ray\.exceptions\.OutOfMemoryError|killed due to memory pressure"
            r"|Out of memory: Kill(?:ed)? process \d+|oom-kill:constraint=CONSTRAINT_NONE"
        ),
        source=KERNEL + "; the line does not show which program used up the memory",
        matches=(
            "Out of memory: Killed process 4242 (pt_main_thread) total-vm:181234kB",
            "python invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
        ),
        misses=("the oom-killer is off",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "shared-memory-full",
        FaultClass.SHARED_MEMORY,
        Owner.MACHINE,
        hints="insufficient shared memory|shared memory|/dev/shm|torch_",
        pattern=(
            "insufficient shared memory|unable to (?:allocate|open|write|resize|mmap).*(?:shared memory|torch_shm"
            r"|</torch_)|/dev/shm.*No space left|No space left on device.*(?:/dev/shm|torch_\d)"
            "|Bus error.*shared memory|unable to allocate shared memory|Error while creating shared memory segment"
        ),
        source="torch: DataLoader, storage in shared memory; NCCL",
        matches=(
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory "
            "(shm).",
            "RuntimeError: unable to write to file </torch_4242_1>: No space left on device (28)",
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x1 (size 9637888)",
        ),
        misses=("shared memory: 64 GB free", "CUDA error: out of shared memory per block requested"),
    ),
    LogRule(
        "host-out-of-memory",
        FaultClass.HOST_OUT_OF_MEMORY,
        Owner.CODE,
        hints="memoryerror|cannot allocate memory|defaultcpuallocator|bad_alloc|unable to allocate",
        pattern=(
            r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
            r"|std::bad_alloc|Unable to allocate [\d.]+ [KMGT]iB for an array"
        ),
        source="Python, numpy, torch, C++",
        matches=(
            "MemoryError",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array with shape "
            "(1000000000000,)",
        ),
        misses=("memory errors: 0", "CUDA out of memory"),
    ),
    LogRule(
        "soft-lockup",
        FaultClass.HOST_OVERLOAD,
        Owner.MACHINE,
        hints="lockup|blocked for more than|rcu_sched|rcu:",
        pattern=(
            r"soft lockup - CPU#\d+ stuck|hard LOCKUP|task \S+:\d+ blocked for more than \d+ seconds"
            r"|rcu_\w+ (?:self-)?detected stall"
        ),
        source=KERNEL,
        matches=(
            "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]",
            "INFO: task python:4242 blocked for more than 122 seconds.",
        ),
        misses=("the task was blocked for a while",),
    ),
    LogRule(
        "too-many-files",
        FaultClass.LIMIT,
        Owner.CODE,
        hints=(
            "too many open files|file-max limit|can't start new thread|resource temporarily unavailable"
            "|pthread_create failed"
        ),
        pattern=(
            r"Too many open files|file-max limit \d+ reached|can't start new thread|pthread_create failed|(?:fork"
            r"|clone|\bthread:).*Resource temporarily unavailable|BlockingIOError: \[Errno 11\]"
        ),
        source="Linux: EMFILE, ENFILE, EAGAIN at fork; Python threads",
        matches=(
            "OSError: [Errno 24] Too many open files: '/data/shard-7'",
            "RuntimeError: can't start new thread",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
            "what():  thread: Resource temporarily unavailable [system:11]",
        ),
        misses=("open files: 512",),
    ),
)
