"""The rules of the kernel log. Each example matches its own rule first, and noise matches no rule."""

from __future__ import annotations

import pytest

from agent.monitor.kernel import rules
from agent.monitor.kernel.log import FELL_OFF, SXID, XID
from everstep.model import xid

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
    "amdgpu 0000:3d:00.0: amdgpu: 0 uncorrectable hardware errors detected in umc block",
    "amdgpu 0000:3d:00.0: amdgpu: 3 correctable hardware errors detected in umc block",
    "amdgpu 0000:3d:00.0: amdgpu: RAS: optional ras ta ucode is not available",
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
