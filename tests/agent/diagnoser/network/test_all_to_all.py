"""The output of the programs of nccl-tests."""

from __future__ import annotations

from agent.diagnoser.network.all_to_all import NcclRun, parsed

TABLE = """
# nThread 1 nGpus 8 minBytes 33554432 maxBytes 33554432 step: 1048576(bytes) warmup iters: 1 iters: 20 agg iters: 1
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    33554432        8388608     float     sum      -1    344.8   97.32  170.31      0    349.5   95.99  167.99      0
    67108864       16777216     float    none      -1    600.1  111.83  195.70      0    610.4  109.94  192.40    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 210.99
"""


def test_the_best_bandwidth_and_no_wrong_value() -> None:
    assert parsed(TABLE) == NcclRun(195.7e9, 0)


def test_wrong_values_are_counted() -> None:
    assert parsed(TABLE.replace("167.99      0", "167.99      5")) == NcclRun(195.7e9, 5)
    assert parsed(TABLE.replace("values : 0 OK", "values : 3 FAILED")) == NcclRun(195.7e9, 3)


def test_a_program_that_failed_says_nothing() -> None:
    assert parsed("node1: Test NCCL failure common.cu:1005 'unhandled system error'\n") is None
