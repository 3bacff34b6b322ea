"""Diagnostic tests of the transfers of bytes within a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from everstep.model.finding import Health
from tests.agent.diagnoser.forked import Run

BREAKS = """
import os
import torch
import torch.distributed as dist
from agent.diagnoser.network import all_to_all
from agent.diagnoser.diagnostic import Bench

class Broken(all_to_all.AllToAllTest):
    def _exchange(self, rank):
        KIND
        return super()._exchange(rank)

limits = all_to_all.AllToAllLimits(ranks=3, mb=1, rounds=1, answer_s=5, deadline_s=30)
for one in Broken(Bench("m0"), limits).run().findings:
    print(one.reason, one.verdict, *one.evidence)
"""
DAMAGE = """
        if rank == 1:
            right = dist.all_to_all_single
            def damaged(came, sent):
                right(came, sent)
                came[7] ^= 1
            dist.all_to_all_single = damaged
"""


def broken(kind: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", BREAKS.replace("KIND", kind.strip())],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_processes_exchange_bytes_and_the_bandwidth_is_measured(forked: Run) -> None:
    found = forked("all-to-all", ranks=3, mb=1, rounds=1)

    assert found.findings == []
    [(name, value)] = found.measures.items()
    assert name == 'bytes_per_second{backend="gloo",ranks="3"}'
    assert value > 0
    assert found.kind


def test_changed_bytes_are_a_fault_and_a_dead_process_is_unknown() -> None:
    assert broken(DAMAGE) == "all-to-all-damaged faulty rank 1: 2 numbers differ"
    assert broken("os._exit(3) if rank == 2 else None").startswith("all-to-all-failed unknown rank 2 ended")


def test_the_machine_sends_itself_bytes(forked: Run) -> None:
    found = forked("loopback", mb=4, rounds=2)

    assert found.verdict is Health.HEALTHY
    blocks = found.measures["verified_bytes"] / (1 << 20)
    assert 2 <= blocks <= 2 * 3, "only complete blocks count, and there are at most two rounds"
    assert found.measures["bytes_per_second"] > 0
