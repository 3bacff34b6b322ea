"""Rules for lines about GPUs: the driver's Xid events, CUDA, and libraries that use CUDA.

``everstep.model.xid`` defines the meaning of each Xid. The owner of an illegal memory access is unknown: ByteRobust
(table 2) blames the infrastructure for 21 of them and users' code for 41.
"""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role, Weight
from everstep.model.finding import Owner
from everstep.model.xid import CATALOGUE, SXID_LINE, XidKind, pattern_of

CUDA = "NVIDIA: CUDA runtime, cudaError_t; text as torch shows it"


def _xid(
    kind: XidKind,
    fault: FaultClass,
    matches: tuple[str, ...],
    misses: tuple[str, ...],
    *,
    pattern: str = "",
    role: Role = Role.CAUSE,
    weight: Weight = Weight.PLAIN,
) -> LogRule:
    """Return the rule for one kind of Xid."""
    own = pattern_of(kind) if kind is not XidKind.UNCLEAR else r"\bXid \([^)]*\): \d+"
    pattern = "|".join(filter(None, (own, pattern)))
    return LogRule(
        kind.code, fault, kind.owner, "xid|fallen off the bus", pattern, CATALOGUE, matches, misses, role, weight
    )


XID_RULES = (
    _xid(
        XidKind.OFF_THE_BUS,
        FaultClass.GPU_UNAVAILABLE,
        matches=("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",),
        misses=("NVRM: Xid (PCI:0000:05:00): 7, pid=79, name=python", "the courier has fallen off the bus"),
        pattern=r"GPU has fallen off the bus|NVIDIA GPU .*fallen off the bus|NVRM:\s+fallen off the bus",
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.MEMORY,
        FaultClass.GPU_MEMORY,
        matches=(
            "NVRM: Xid (PCI:0000:3b:00): 48, pid=812, name=python, DBE (double bit error) ECC error",
            "NVRM: Xid (PCI:0000:3b:00): 95, pid=812, name=python, Uncontained: LTC TAG",
        ),
        misses=(
            "NVRM: Xid (PCI:0000:3b:00): 480, pid=812",
            "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row",
        ),
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.CONTAINED,
        FaultClass.GPU_MEMORY,
        matches=("NVRM: Xid (PCI:0000:3b:00): 94, pid=7194, name=python3, Contained: SM (0x1).",),
        misses=("NVRM: Xid (PCI:0000:3b:00): 9, pid=94, name=python3",),
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.LINK,
        FaultClass.GPU_UNAVAILABLE,
        matches=(
            "NVRM: Xid (PCI:0000:05:00): 74, pid=2301, name=python, NVLink: fatal error detected on link 5",
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000)",
            "NVRM: Xid (PCI:0000:b9:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link "
            "6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        ),
        misses=(
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)",
            "NVRM: Xid (PCI:0019:01:00): 145, pid=876766, name=ray, RLW_RXPIPE Nonfatal XC0 i0 Link 12",
        ),
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.BROKEN,
        FaultClass.GPU_UNAVAILABLE,
        matches=(
            "NVRM: Xid (PCI:0000:9b:00): 119, pid=1240590, name=python, Timeout after 6s of waiting for RPC response "
            "from GPU4 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20803032 0x58c).",
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
        ),
        misses=(
            "NVRM: Xid (PCI:0000:9b:00): 11, pid=119, name=python",
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)",
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)",
        ),
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.DEGRADED,
        FaultClass.GPU_UNAVAILABLE,
        matches=(
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x000525c6 0x00000000)",
        ),
        misses=(
            "NVRM: Xid (PCI:0000:4c:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)",
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x000525c6 0x00000001)",
        ),
    ),
    _xid(
        XidKind.PEER,
        FaultClass.NETWORK,
        matches=("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)",),
        misses=("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x004525c6 0x00000000)",),
    ),
    LogRule(
        "sxid-fatal",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="sxid|nvswitch fatal",
        pattern=f"{SXID_LINE}|detected NVSwitch fatal error",
        source="NVIDIA: fabric manager",
        matches=("nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",),
        misses=(
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 22013, Fatal, Link 40 Minion DLREQ interrupt",
        ),
        weight=Weight.DECISIVE,
    ),
    _xid(
        XidKind.PROGRAM,
        FaultClass.CUDA_ERROR,
        matches=(
            "NVRM: Xid (PCI:0000:38:00): 43, pid=2924364, name=pt_main_thread, Ch 00000008",
            "NVRM: Xid (PCI:0000:38:00): 31, pid=4242, name=python, MMU Fault: ENGINE GRAPHICS",
            "NVRM: Xid (PCI:0000:38:00): 137, pid=4242, name=python, Failing SM client, fault type PRIV",
            "NVRM: Xid (PCI:0000:38:00): 45, pid=4242, name=python, Ch 00000010 caused by previous Xid 31",
        ),
        misses=("NVRM: Xid (PCI:0000:38:00): 310, pid=31",),
    ),
    _xid(
        XidKind.FOLLOWS,
        FaultClass.CUDA_ERROR,
        matches=("NVRM: Xid (PCI:0000:38:00): 45, pid=4242, name=python, Ch 00000010",),
        misses=("NVRM: Xid (PCI:0000:38:00): 48, pid=45",),
        role=Role.SUMMARY,
    ),
    _xid(
        XidKind.SOFT,
        FaultClass.UNKNOWN,
        matches=(
            "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to "
            "activate.",
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        ),
        misses=("exid (3): 63",),
        pattern=r"\bSXid \([^)]*\): \d+",
        weight=Weight.WEAK,
    ),
    _xid(
        XidKind.UNCLEAR,
        FaultClass.UNKNOWN,
        matches=(
            "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, errorString CTX SWITCH TIMEOUT",
            "NVRM: Xid (0000:03:00): 14, Channel 00000001",
        ),
        misses=("exid (3): 109",),
        weight=Weight.WEAK,
    ),
)
GPU_RULES = (
    *XID_RULES,
    LogRule(
        "pci-device-gone",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="(rev ff)|rminitadapter|nv_err_gpu_is_lost|lost from the bus",
        pattern=(
            r"(?:3D|VGA|Display|Processing)\b.*(?:NVIDIA|AMD|ATI)\b.*\(rev ff\)|NVRM: .*RmInitAdapter failed"
            "|NV_ERR_GPU_IS_LOST|GPU lost from the bus"
        ),
        source="lspci; NVIDIA's driver",
        matches=(
            "0000:b3:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev ff)",
            "NVRM: GPU 0000:b3:00.0: RmInitAdapter failed! (0x26:0x56:1474)",
            "NVRM: GPU0 GPU lost from the bus [NV_ERR_GPU_IS_LOST]",
        ),
        misses=("0000:b3:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "nvlink-fabric",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="nvls.cc|fabric manager|fabricmanager|fabric-manager",
        pattern=(
            r"nvls\.cc:\d+ NCCL WARN Cuda failure (?:\d+ )?'(?!out of memory|device-side|an "
            r"illegal memory|uncorrectable"
            r"|operation not (?:permitted|supported))|nvidia-fabricmanager\S*: .*(?:failed|Failed|fatal|aborting)"
            r"|[Ff]abric ?[Mm]anager (?:is not running|is not (?:yet )?(?:ready|initialized)|failed|exited|was stopped)"
        ),
        source="NCCL: transport/nvls.cc; NVIDIA: fabric manager",
        matches=(
            "n1:98:141 [2] transport/nvls.cc:244 NCCL WARN Cuda failure 1 'invalid argument'",
            "n1:97 [1] transport/nvls.cc:223 NCCL WARN Cuda failure 999 'unknown error'",
            "nvidia-fabricmanager[812]: failed to configure all the available GPUs or NVSwitches",
        ),
        misses=(
            "n1:98:141 [2] NCCL INFO NVLS multicast support is available on dev 2",
            "n1:98:141 [2] transport/nvls.cc:244 NCCL WARN Cuda failure 2 'out of memory'",
            "n1:98:141 [2] transport/nvls.cc:244 NCCL WARN Cuda failure 800 'operation not permitted'",
            "fabric manager is running",
        ),
    ),
    LogRule(
        "rocm-memory-access-fault",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="memory access fault by gpu",
        pattern="Memory access fault by GPU",
        source="ROCm: ROCR-Runtime; a kernel, the driver or the GPU may cause it",
        matches=(
            "Memory access fault by GPU node-3 (Agent handle: 0x5a5c587a51c0) on address 0x709843600000. Reason: "
            "Write access to a read-only page.",
        ),
        misses=("memory access faults: 0",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "rocm-gpu-hang",
        FaultClass.GPU_UNAVAILABLE,
        Owner.UNKNOWN,
        hints="hw exception by gpu|gpu hang|gpu reset",
        pattern=r"HW Exception by GPU|amdgpu\b.*: GPU reset (?:begin|\(\d+\) failed)",
        source="ROCm: ROCR-Runtime; Linux: amdgpu; a kernel, the driver or the GPU may cause it",
        matches=(
            "HW Exception by GPU node-9 (Agent handle: 0x631351bb5a20) reason :GPU Hang",
            "amdgpu 0000:3d:00.0: amdgpu: GPU reset begin!",
        ),
        misses=("exceptions of the hw: 0",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "rocm-memory-error",
        FaultClass.GPU_MEMORY,
        Owner.MACHINE,
        hints="uncorrectable hardware error|hiperroreccnotcorrectable",
        pattern=r"amdgpu\b.*\b[1-9]\d* (?:new )?uncorrectable hardware errors detected|hipErrorECCNotCorrectable",
        source="Linux: amdgpu_ras.c; HIP: hipError_t",
        matches=("amdgpu 0000:3d:00.0: amdgpu: 2 uncorrectable hardware errors detected in umc block",),
        misses=("amdgpu 0000:3d:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "rocm-runtime-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="hsa_status_error|rocblas_status|miopenstatus",
        pattern=r"HSA_STATUS_ERROR\w*|rocblas_status_(?:internal|memory|check)\w*|miopenStatus(?!Success)\w+",
        source="ROCm: hsa_status_t, rocBLAS, MIOpen",
        matches=(
            ":0:rocdevice.cpp :2982: 4061 us: Callback: Queue 0x7f aborting with error : "
            "HSA_STATUS_ERROR_EXCEPTION: An "
            "HSAIL operation resulted in a hardware exception. code: 0x1016",
            "RuntimeError: miopenStatusUnknownError",
        ),
        misses=("HSA_STATUS_SUCCESS",),
    ),
    LogRule(
        "neuron-hardware-error",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="nrt_exec_hw_err|nrt_hw_err",
        pattern=r"NRT_(?:EXEC_)?HW_ERR_\w+",
        source="AWS Neuron runtime: nrt_status.h",
        matches=("ERROR  NRT:nrt_infodump  Failure: NRT_EXEC_HW_ERR_HBM_UE in nrt_execute()",),
        misses=("NRT_SUCCESS",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "neuron-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="nrt",
        pattern=r"Nrt::\w+ failed|\bnrt_(?:load|execute|init)\S* status=[1-9]|Failure: NRT_\w+ in nrt_",
        source="AWS Neuron runtime",
        matches=(
            "(0) INTERNAL: Nrt::Load failed on NeuronCores 0-0(2): nrt_load status=1, error "
            'message="Non specific failure".',
        ),
        misses=("NRT version: 2.20.22.0",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "npu-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="npu error|acl api failed",
        pattern="NPU error, error code is |call acl api failed",
        source="Ascend: torch_npu",
        matches=("RuntimeError: npuSynchronizeDevice:NPUStream.cpp:363 NPU error, error code is 107020",),
        misses=("NPU errors: 0",),
        vague=True,
    ),
    LogRule(
        "nvml-gpu-lost",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="gpu is lost|gpu requires reset|device handle for gpu|nvml|nvidia-smi has failed|no devices were found",
        pattern=(
            "GPU is lost|GPU requires reset|Unable to determine the device handle for GPU|NVMLError_(?:GpuIsLost"
            r"|ResetRequired|LibRmVersionMismatch|DriverNotLoaded)\b|Failed to initialize NVML|NVIDIA-SMI has failed"
            "|NVML/RM version mismatch|nvml error: driver|^No devices were found"
        ),
        source="NVIDIA: nvmlErrorString, nvidia-smi",
        matches=(
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover "
            "this GPU",
            "Failed to initialize NVML: Driver/library version mismatch",
            "pynvml.NVMLError_GpuIsLost: GPU is lost",
            "pynvml.nvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.",
            "nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown",
            "docker: Error response from daemon: OCI runtime create failed: runc create failed: nvidia-container-cli: "
            "initialization error: nvml error: driver/library version mismatch: unknown.",
        ),
        misses=(
            "nvml initialized, 8 GPUs",
            "INFO no devices were found in the cache",
            "pynvml.NVMLError_InvalidArgument: Invalid Argument",
            "RuntimeError: the version of the library does not match the driver",
        ),
    ),
    LogRule(
        "cuda-ecc",
        FaultClass.GPU_MEMORY,
        Owner.MACHINE,
        hints="uncorrectable|ecc error",
        pattern="uncorrectable ECC error|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
        source=CUDA,
        matches=("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
        misses=("ecc errors: 0 uncorrectable",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "cuda-link-uncorrectable",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="nvlink",
        pattern="uncorrectable NVLink error|CUDA_ERROR_NVLINK_UNCORRECTABLE",
        source=CUDA,
        matches=("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",),
        misses=("NVLink errors: 0",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "cuda-device-unavailable",
        FaultClass.GPU_UNAVAILABLE,
        Owner.MACHINE,
        hints="cuda|nvidia driver|no gpus found",
        pattern=(
            r"CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected"
            "|CUDA unknown error|CUDA driver initialization failed|Found no NVIDIA driver"
            "|NVIDIA driver on your system is too old|CUDA driver version is insufficient"
            "|CUDA error: system not yet initialized|Cuda failure (?:802 )?'system not "
            "yet|cudaErrorSystemNotReady|CUDA error: unknown error"
            "|No CUDA GPUs are available|requires at least one CUDA device|no GPUs found"
            "|CUDA error: hardware stack error|Error 80[234]: .*(?:system not yet initialized|driver)"
        ),
        source=CUDA,
        matches=(
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "RuntimeError: No CUDA GPUs are available",
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        ),
        misses=("CUDA available: True", "8 CUDA GPUs are available"),
    ),
    LogRule(
        "cuda-not-compiled",
        FaultClass.DEPENDENCY,
        Owner.CODE,
        hints=(
            "not compiled with cuda|no kernel image|compiled with cuda enabled|cuda capability|invalid device function"
        ),
        pattern=(
            "Torch not compiled with CUDA enabled|no kernel image is available for execution"
            r"|CUDA capability \S+ is not compatible with|HIP error: invalid device function"
        ),
        source="torch, CUDA runtime",
        matches=(
            "AssertionError: Torch not compiled with CUDA enabled",
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "RuntimeError: CUDA capability sm_90 is not compatible with this build",
        ),
        misses=("compiled with cuda 13.2", "CUDA capability sm_90 is supported"),
    ),
    LogRule(
        "gpu-out-of-memory",
        FaultClass.GPU_OUT_OF_MEMORY,
        Owner.CODE,
        hints="out of memory|out_of_memory|outofmemory|memoryallocation|cublas_status_alloc_failed|failed to allocate",
        pattern=(
            r"\b(?:CUDA|HIP|XPU) out of memory|RESOURCE_EXHAUSTED: Out of memory|\b(?:CUDA|HIP)(?: driver"
            "| runtime)? (?:error|failure)(?: 2)?:? '?out of memory|cudaErrorMemoryAllocation"
            r"|\btorch(?:\.cuda)?\.OutOfMemoryError\b|CUDA_ERROR_OUT_OF_MEMORY|\bcudaMalloc\w* failed: out of memory"
            "|CUBLAS_STATUS_ALLOC_FAILED|cuda.*failed to allocate"
        ),
        source=CUDA + "; torch.OutOfMemoryError",
        matches=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "79.11 GiB",
            "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 79.15 GiB "
            "total capacity; 77.01 GiB already allocated; 8.19 MiB free)",
            "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
            "RuntimeError: CUDA error: out of memory",
            "torch.AcceleratorError: CUDA error: out of memory",
            "RuntimeError: CUDA driver error: out of memory",
            "cudaErrorMemoryAllocation: out of memory",
            "thrust::system::system_error: cudaErrorMemoryAllocation: the API call failed because it was unable to "
            "allocate enough memory",
            "m1:812:812 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 "
            "bytes.",
        ),
        misses=(
            "out of memory retries: 0",
            "java.lang.OutOfMemoryError: heap",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "the host is out of memory; the CUDA error came later",
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
    ),
    LogRule(
        "nan-checked-before-communication",
        FaultClass.NAN,
        Owner.UNKNOWN,
        hints="nancheck|checkfornan",
        pattern=r"NanCheck\.cu:\d+|checkForNaN.*Assertion",
        source="torch.distributed, TORCH_NCCL_NAN_CHECK: a value of this rank was not finite before it was sent",
        matches=(
            "/pytorch/torch/csrc/distributed/c10d/NanCheck.cu:185: checkForNaN: block: [0,0,0], thread: [21,0,0] "
            "Assertion `!isnan(val)` failed.",
        ),
        misses=("Indexing.cu:1553: operator(): block: [7,0,0], thread: [32,0,0] Assertion `i < n` failed.",),
    ),
    LogRule(
        "cuda-device-side-assert",
        FaultClass.CUDA_ERROR,
        Owner.CODE,
        hints="device-side assert|assertion",
        pattern=r"device-side assert triggered|\.cu:\d+:.*block: \[.*thread: \[.*Assertion .* failed",
        source=CUDA,
        matches=(
            "RuntimeError: CUDA error: device-side assert triggered",
            "/build/aten/src/ATen/native/cuda/Indexing.cu:1553: operator(): block: [7,0,0], thread: [32,0,0] "
            'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.',
        ),
        misses=("AssertionError: the assertion on the batch failed",),
    ),
    LogRule(
        "cuda-invalid-device",
        FaultClass.CUDA_ERROR,
        Owner.CODE,
        hints="invalid device ordinal",
        pattern="invalid device ordinal",
        source=CUDA,
        matches=("RuntimeError: CUDA error: invalid device ordinal",),
        misses=("device ordinal 3",),
    ),
    LogRule(
        "cuda-illegal-memory-access",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="illegal memory access|illegal_address",
        pattern="an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
        source=CUDA,
        matches=("RuntimeError: CUDA error: an illegal memory access was encountered",),
        misses=("no illegal memory access found",),
    ),
    LogRule(
        "cuda-misaligned-address",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="misaligned address",
        pattern="CUDA error: misaligned address",
        source=CUDA,
        matches=("RuntimeError: CUDA error: misaligned address",),
        misses=("misaligned address space",),
    ),
    LogRule(
        "cuda-launch-failure",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="launch failure|illegal instruction was encountered|launch timed out",
        pattern=(
            "unspecified launch failure|CUDA error: an illegal instruction was encountered"
            "|CUDA error: the launch timed out"
        ),
        source=CUDA,
        matches=("RuntimeError: CUDA error: unspecified launch failure",),
        misses=("launch failures: 0",),
    ),
    LogRule(
        "cuda-library-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="cublas_status_|cudnn|cusolver_status_|cufft",
        pattern=(
            r"CUDA error: CUBLAS_STATUS_(?!SUCCESS)|cuDNN error: |CUDNN_STATUS_(?!SUCCESS)\w+|cusolver error: "
            "|cuFFT error: "
        ),
        source="torch: cuBLAS, cuDNN, cuSOLVER, cuFFT",
        matches=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`",
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        ),
        misses=("cudnn version 90100", "CUBLAS_STATUS_SUCCESS"),
    ),
    LogRule(
        "cuda-fork",
        FaultClass.USER_EXCEPTION,
        Owner.CODE,
        hints="re-initialize cuda",
        pattern="Cannot re-initialize CUDA in forked subprocess",
        source="torch.cuda",
        matches=(
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
            "must use the 'spawn' start method",
        ),
        misses=("re-initialize CUDA graphs",),
    ),
    LogRule(
        "xla-internal-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="internal: ",
        pattern=r"\b(?:Xla)?RuntimeError: INTERNAL: ",
        source="XLA: absl::StatusCode::kInternal; a further line may name the cause",
        matches=("jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Failed to execute XLA Runtime executable",),
        misses=("jaxlib.xla_extension.XlaRuntimeError: INVALID_ARGUMENT: Argument shapes differ",),
        vague=True,
    ),
    LogRule(
        "cuda-error",
        FaultClass.CUDA_ERROR,
        Owner.UNKNOWN,
        hints="cuda error|cuda failure|cuda_error_|cuda driver error|hip error|hiperror|hip failure",
        pattern=(
            r"(?:CUDA|HIP) error: |(?:Cuda|HIP) failure:? |\bCUDA_ERROR_[A-Z_]+|CUDA driver "
            r"error: |\bhipError[A-Z]\w+"
        ),
        source=CUDA,
        matches=("RuntimeError: CUDA error: invalid configuration argument", "NCCL WARN Cuda failure 'unknown error'"),
        misses=("CUDA errors are reported late", "no cuda errors"),
        vague=True,
    ),
)
