"""The rules of the kernel log: each example is found by its own rule, and noise by none."""

from __future__ import annotations

import pytest

from agent.monitor.kernel import rules, xid
from agent.monitor.kernel.log import FELL_OFF, SXID, XID
from everstep.model.health import Health
from everstep.model.owner import Owner

EXAMPLES = [(rule, text) for rule in rules.RULES for text in rule.examples]
NOISE = (
    "mlx5_core 0000:12:00.0: mlx5_cmd_out_err:838:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation",
    "EXT4-fs (sda1): mounted filesystem with ordered data mode. Quota mode: none.",
    "nfs: server 10.0.0.5 OK",
    "python3[4711]: segfault at 0 ip 00007f sp 00007f error 4 in libtorch_cpu.so[7f00+1000]",
    "mce: [Hardware Error]: Machine check events logged",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
    "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
    "Buffer I/O error on dev sr0, logical block 0, async page read",
    "blk_update_request: I/O error, dev loop0, sector 2048 op 0x0:(READ) flags 0x0",
    "I/O error, dev nbd3, sector 0 op 0x1:(WRITE) flags 0x800",
    "I/O error, dev sda, sector 40 op 0x3:(DISCARD) flags 0x800",
    "tg3 0000:02:00.0 eth0: Link is down",
    "BUG: workqueue lockup - pool cpus=0 node=0 flags=0x0 nice=0 stuck for 35s!",
    "BUG: sleeping function called from invalid context at kernel/locking/mutex.c:580",
    "BUG: MAX_LOCKDEP_CHAINS too low!",
    "BTRFS error (device loop3): open_ctree failed",
    "XFS (loop1): Shutting down filesystem",
    "BERT: [Hardware Error]: event severity: fatal",
    "process '/tmp/NVRM: Xid (PCI:0000:05:00): 79, x' started with executable stack",
    "audit: type=1400 msg='NVRM: Xid (PCI:0000:05:00): 79, pid=1'",
    "oom_reaper: reaped process 4711 (python3), now anon-rss:0kB",
    "NVRM: GPU at PCI:0000:00:08.0: GPU-01234567",
    "perf: interrupt took too long (2507 > 2500), lowering kernel.perf_event_max_sample_rate to 79000",
)


@pytest.mark.parametrize(("rule", "text"), EXAMPLES, ids=[rule.reason.code for rule, _ in EXAMPLES])
def test_each_example_is_found_by_its_rule_first(rule: rules.KernelRule, text: str) -> None:
    assert next(other.reason.code for other in rules.RULES if other.pattern.search(text)) == rule.reason.code


def test_every_rule_has_an_example_and_a_code_of_its_own() -> None:
    assert all(rule.examples for rule in rules.RULES)
    codes = [reason.code for reason in (*rules.REASONS, *xid.REASONS)]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("text", NOISE)
def test_noise_is_found_by_none(text: str) -> None:
    patterns = [XID, SXID, FELL_OFF, rules.OOM_KILL, *(rule.pattern for rule in rules.RULES)]
    assert not [pattern.pattern for pattern in patterns if pattern.search(text)]


def test_every_xid_is_listed_once() -> None:
    codes = [entry.code for entry in xid.TABLE]
    assert len(codes) == len(set(codes))


# What NVIDIA's DCGM 4.6 counts as devastating, what NVIDIA's Kubernetes plugin takes for the application's, and what
# its catalogue says to ignore or to handle by restarting the application.
@pytest.mark.parametrize("code", [48, 74, 79, 95, 119, 120, 140])
def test_what_is_devastating_names_the_machine(code: int) -> None:
    reason = xid.xid_of(code, "")
    assert (reason.owner, reason.verdict, reason.sure) == (Owner.MACHINE, Health.FAULTY, True)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109, 63, 94, 154, 1, 999])
def test_what_is_not_names_no_machine_with_confidence(code: int) -> None:
    assert not xid.xid_of(code, "").sure


@pytest.mark.parametrize("code", [13, 31, 43, 45, 999])
def test_what_a_program_causes_is_no_fault_of_the_machine(code: int) -> None:
    assert xid.xid_of(code, "").verdict is Health.UNKNOWN


@pytest.mark.parametrize(
    ("code", "rest", "expected"),
    [
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000)", "xid-nvlink-fatal"),
        (145, "pid=876766, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 12 (0x040980c2)", "xid-145"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "xid-154-action"),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)", "xid-154"),
    ],
)
def test_of_some_the_rest_of_the_line_decides(code: int, rest: str, expected: str) -> None:
    assert xid.xid_of(code, rest).code == expected
