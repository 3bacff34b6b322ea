"""Rules for lines about NCCL, gloo, torch's TCPStore and InfiniBand."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Role
from everstep.model.finding import Owner

NCCL = "NCCL: ncclResult_t, NCCL_DEBUG output"
TORCH = "torch.distributed"
GLOO = "gloo, as shipped with torch 2.11 to 2.15"

COMMUNICATION_RULES = (
    LogRule(
        "nccl-invalid-usage",
        FaultClass.NCCL_ERROR,
        Owner.CODE,
        hints="ncclinvalid|duplicate gpu detected|invalid usage|invalid argument",
        pattern=(
            "ncclInvalid(?:Usage|Argument)|Duplicate GPU detected|NCCL "
            "(?:error|operation).*(?:invalid usage|invalid argument)"
        ),
        source=NCCL,
        matches=(
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "node1:8:8 [1] init.cc:901 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000",
        ),
        misses=("ValueError: invalid argument",),
    ),
    LogRule(
        "infiniband-completion",
        FaultClass.INFINIBAND,
        Owner.NETWORK,
        hints="got completion|ib_wc_|ibv_|net/ib|mlx5",
        pattern=(
            r"NET/IB ?: .*Got completion (?:from peer .* )?with (?:status=|error )\d+|IBV_WC_\w*ERR"
            r"|Call to ibv_\w+ failed|NET/IB ?: .*(?:Got async (?:event|error)|Unable to open device)"
            "|mlx5_core.*(?:unrecoverable hardware error|health compromised|Cable unplugged"
            "|will cause a leak of a command resource)"
        ),
        source=NCCL + "; mlx5 driver",
        matches=(
            "node1:123:456 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.7<33411> with status=12 opcode=1 "
            "len=0 vendor err 129 (Recv)",
            "node1:123:456 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 5, opcode 0",
            "misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
            "mlx5_core 0000:0c:00.0: Port module event[error]: module 0, Cable error, Cable unplugged",
        ),
        misses=("NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", "mlx5_cmd_out_err: ACCESS_REG failed"),
    ),
    LogRule(
        "efa-request-failed",
        FaultClass.INFINIBAND,
        Owner.NETWORK,
        hints="net/ofi|efa:cq|efa_",
        pattern=(
            r"NET/OFI .*(?:[Rr]equest \S+ completed with error|completed with error\. RC)|efa:cq:\w*_?handle_error"
            r"|efa:cq:.*<warn> err: \d+"
        ),
        source="aws-ofi-nccl: nccl_ofi_rdma.cpp, nccl_net_ofi; libfabric: prov/efa",
        matches=(
            "m2:470:611 [3] ofi_process_cq:1033 NCCL WARN NET/OFI Request 0x7f22c40018d8 completed with error. RC: 21. "
            "Error: unknown error.",
            "libfabric:451707:1708520807::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, message: Invalid address",
        ),
        misses=(
            "NCCL INFO NET/OFI Selected Provider is efa",
            "libfabric:462:1673041636:efa:core:rxr_info_to_rxr():506<warn> FI_HMEM capability requires RDMA",
        ),
    ),
    LogRule(
        "ucx-transport-failed",
        FaultClass.INFINIBAND,
        Owner.NETWORK,
        hints="retry count exceeded|retry counter exceeded|remote operation error",
        pattern=r"[Tt]ransport retry count(?:er)? exceeded|ib_mlx5_log\.c:\d+ .*(?:Remote|Local) \w+ error",
        source="UCX: ib_mlx5_log.c",
        matches=(
            "[n7:2330856:0:2330856] ib_mlx5_log.c:177  Transport retry count exceeded on "
            "mlx5_0:1/IB (synd 0x15 vend 0x81)",
        ),
        misses=("the retry count is 7",),
    ),
    LogRule(
        "link-down",
        FaultClass.NETWORK,
        Owner.NETWORK,
        hints="link down|link is down|link_downed|transmit queue",
        pattern=(
            r"(?:\b(?:eth|ens|enp|eno|ib|bond|mlx5_)\w*\b.*\b[Ll]ink (?:is )?[Dd]own)"
            "|NETDEV WATCHDOG: .*transmit queue.*timed out"
        ),
        source="Linux kernel: network drivers",
        matches=("mlx5_core 0000:0c:00.0 ens3f0: Link down", "bond0: link status definitely down; ib3: Link is Down"),
        misses=("the link down the page", "link download started"),
    ),
    LogRule(
        "nccl-remote-error",
        FaultClass.CONNECTION_LOST,
        Owner.UNKNOWN,
        hints="ncclremoteerror|remote process exited|remote error",
        pattern="ncclRemoteError|remote process exited or there was a network error",
        source=NCCL,
        matches=(
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or "
            "there was a network error, NCCL version 2.21.5",
        ),
        misses=("the remote process exited with 0",),
        role=Role.LOSS,
    ),
    LogRule(
        "nccl-watchdog-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="watchdog|collective operation timeout|before timing out|heartbeat monitor|detected by watchdog",
        pattern=(
            r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out"
            "|Timeout at NCCL work|Received a dump signal due to a collective timeout"
            "|ProcessGroupNCCL's watchdog got stuck|failure detected by watchdog|due to ProcessGroupNCCL watchdog hang"
            "|first PG on this rank that detected|HeartbeatMonitor.*(?:terminating|timed out|unable to)"
            "|[Hh]eartbeat monitor timed out|detected by watchdog at work|watchdog thread terminated with exception"
        ),
        source=TORCH + ", ProcessGroupNCCL",
        matches=(
            "[rank3]:[E1121 07:36:56.233 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before "
            "timing out.",
            "[PG ID 0 PG GUID 0(default_pg) Rank 1] Exception (either an error or timeout) detected by watchdog at "
            "work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.",
        ),
        misses=("watchdog: BUG: soft lockup - CPU#3 stuck for 22s!", "the watchdog is on"),
        role=Role.WAIT,
    ),
    LogRule(
        "nccl-abort-by-watchdog",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="taking the entire process down|to avoid data inconsistency|c10::dist|failed or timed out",
        pattern=(
            "[Tt]o avoid data inconsistency, we are taking the entire process down|taking the entire process down"
            r"|terminate called after throwing an instance of 'c10::Dist\w*Error'|NCCL "
            r"operations have failed or timed out"
        ),
        source=TORCH + ", ProcessGroupNCCL",
        matches=(
            "[rank0]:[E1121 07:36:57.001 ProcessGroupNCCL.cpp:621] To avoid data inconsistency, we are taking the "
            "entire process down.",
        ),
        misses=("taking the process down the list",),
        role=Role.WAIT,
    ),
    LogRule(
        "jax-peer-lost",
        FaultClass.CONNECTION_LOST,
        Owner.UNKNOWN,
        hints="heartbeat|coordination|jax distributed service|coordinator detected",
        pattern=(
            r"Task \S+ heartbeat timeout|coordinator detected missing heartbeats|JAX distributed service detected fatal"
            r"|(?:coordination service|CoordinationService).*(?:UNAVAILABLE|connection|disconnect)"
            r"|Failed to send RPC to coordination service|another task died"
        ),
        source="XLA: tsl/distributed_runtime/coordination, pjrt/distributed/client.h",
        matches=(
            "E coordination_service.cc:954] /job:jax_worker/replica:0/task:37 has been set to ERROR in coordination "
            "service: UNAVAILABLE: Task /job:jax_worker/replica:0/task:37 heartbeat timeout.",
            "F client.h:77] Terminating process because the JAX distributed service detected fatal errors.",
        ),
        misses=("I coordination_service.cc:553] /job:worker/replica:0/task:1 has connected to coordination service.",),
        role=Role.LOSS,
    ),
    LogRule(
        "jax-barrier-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="barrier timed out|deadline_exceeded",
        pattern=(
            r"DEADLINE_EXCEEDED: (?:Barrier timed out|GetKeyValue\(\) timed out)|Barrier "
            r"timed out\. (?:Id|Barrier)"
        ),
        source="XLA: tsl/distributed_runtime/coordination",
        matches=(
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: "
            "orbax_save_30. This usually "
            "happens because a task triggered the barrier unexpectedly early",
        ),
        misses=("google.api_core.exceptions.DeadlineExceeded: 504 Deadline Exceeded",),
        role=Role.WAIT,
    ),
    LogRule(
        "hccl-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="hccl",
        pattern=r"hccl.*\btime ?out (?:occurred|of)|HCCL.*\b(?:timeout|timed out)",
        source="Ascend: HCCL",
        matches=("EI9999: The error from device(chipId:0), hccl fftsplus task timeout occurred during task execution",),
        misses=("HCCL_EXEC_TIMEOUT=1800",),
        role=Role.WAIT,
    ),
    LogRule(
        "gloo-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints="timed out waiting|monitoredbarrier",
        pattern=(
            r"Timed out waiting \d+ms for (?:send|recv) operation|failed to pass monitoredBarrier"
            "|monitoredBarrier.*(?:timed|time|received errors)"
        ),
        source=GLOO,
        matches=(
            "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
            "operation to complete",
            "RuntimeError: Rank 2 failed to pass monitoredBarrier in 30000 ms",
            "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0.",
        ),
        misses=("TimeoutError: Timed out waiting for shard 7 of the dataset",),
        role=Role.WAIT,
    ),
    LogRule(
        "store-timeout",
        FaultClass.HANG,
        Owner.UNKNOWN,
        hints=(
            "client socket has timed out|wait timeout after|rendezvoustimeout|dist|store|timed out after|socket timeout"
        ),
        pattern=(
            r"client socket has timed out after|wait timeout after \d+ms|RendezvousTimeoutError"
            r"|DistStoreError: (?:Timed out|.*timed? ?out)|Timed out after \d+ seconds waiting for clients"
            r"|torch\.distributed.*Socket Timeout|DistStoreError: Socket Timeout"
        ),
        source=TORCH + ", TCPStore",
        matches=(
            "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
            "connect to (m0, 29500).",
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /missing",
        ),
        misses=("the store has timed out items",),
        role=Role.WAIT,
    ),
    LogRule(
        "peer-unreachable",
        FaultClass.CONNECTION_LOST,
        Owner.NETWORK,
        hints=(
            "connection timed out|no route to host|network is unreachable|connection abort|connect: |is not reached: "
        ),
        pattern=(
            "(?:gloo|TCPStore|Dist(?:Network|Store|Backend)Error|NCCL|socket(?:Start|Poll)Connect)"
            ".*(?:Connection timed out|No route to host|Network is unreachable|Software caused connection abort)"
            r"|gloo/transport/tcp/.*\bconnect: (?!Connection refused)"
            r"|the TCPStore at \S+, where all ranks meet, is not reached"
        ),
        source="Linux: ETIMEDOUT, EHOSTUNREACH, ENETUNREACH in lines of gloo, TCPStore or NCCL; gloo: a failed connect",
        matches=(
            "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/socket.cc:142] rv != -1. -1 "
            "vs -1. connect: Invalid argument",
            "RuntimeError: [../gloo/transport/tcp/pair.cc:553] recv: Connection timed out [10.99.0.13]:4711",
            "DistNetworkError: The client socket has failed to connect: No route to host",
            "socketStartConnect: Connect to fe80::7e1e:52ff:fe3e:6d31%enP2<53171> failed : "
            "Software caused connection abort",
            "ConnectionError: the TCPStore at m0:4711, where all ranks meet, is not reached: Invalid argument",
        ),
        misses=("OSError: No route to host: nfs-3",),
        role=Role.LOSS,
    ),
    LogRule(
        "peer-connection",
        FaultClass.CONNECTION_LOST,
        Owner.UNKNOWN,
        hints=(
            "closed by peer|reset by peer|likely closed|connection refused|broken pipe|socket closed|sendbytes failed"
            "|remote peer|client socket has failed"
        ),
        pattern=(
            r"(?:gloo|TCPStore|Dist(?:Network|Store|Backend)Error|NCCL|socket\.cpp|socketProgress|socket(?:Start"
            "|Poll)Connect).*(?:Connection (?:closed|reset) by (?:remote )?peer|Connection refused|Broken pipe"
            "|[Cc]losed by remote peer)|Connection closed by (?:remote )?peer|Connection was likely closed"
            "|sendBytes failed|recvValue failed|client socket has failed to connect"
        ),
        source=GLOO + "; TCPStore; NCCL",
        matches=(
            "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.12]:4213",
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the "
            "remote server shutdown or crash?",
            "misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer node2<41233>",
        ),
        misses=("ValueError: Connection", "connection closed by the user"),
        role=Role.LOSS,
    ),
    LogRule(
        "nccl-cuda-error",
        FaultClass.NCCL_ERROR,
        Owner.UNKNOWN,
        hints="unhandled cuda error|ncclunhandledcudaerror",
        pattern="unhandled cuda error|ncclUnhandledCudaError",
        source=NCCL,
        matches=(
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled cuda error, "
            "NCCL version 2.19.3",
        ),
        misses=("unhandled error in the cuda sampler",),
        vague=True,
    ),
    LogRule(
        "nccl-system-error",
        FaultClass.NCCL_ERROR,
        Owner.UNKNOWN,
        hints="ncclsystemerror|unhandled system error",
        pattern="ncclSystemError|NCCL (?:error|operation).*unhandled system error",
        source=NCCL,
        matches=(
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        ),
        misses=("SystemError: unhandled",),
        vague=True,
    ),
    LogRule(
        "nccl-internal-error",
        FaultClass.NCCL_ERROR,
        Owner.UNKNOWN,
        hints="ncclinternalerror|internal error",
        pattern="ncclInternalError|NCCL (?:error|operation).*internal error",
        source=NCCL,
        matches=(
            "ncclInternalError: Internal check failed.",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, internal error, NCCL "
            "version 2.18",
        ),
        misses=("HTTP 500 internal error",),
        vague=True,
    ),
    LogRule(
        "nccl-error",
        FaultClass.NCCL_ERROR,
        Owner.UNKNOWN,
        hints="nccl error|nccl operation|libnccl",
        pattern=r"NCCL error in: |NCCL operation .* failed: |segfault at .* in libnccl",
        source=NCCL,
        matches=(
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, something new",
            "python[4242]: segfault at 8 ip 00007f error 4 in libnccl.so.2[7f00+100000]",
        ),
        misses=("NCCL errors are printed with NCCL_DEBUG=WARN",),
        vague=True,
    ),
)
