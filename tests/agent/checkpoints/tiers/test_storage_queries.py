"""Storage that hangs blocks one thread, and delays no query of other storage."""

from __future__ import annotations

import threading

from agent.checkpoints.tiers.storage_queries import NoAnswer, StorageQueries


def fails() -> str:
    raise PermissionError("not allowed")


def test_each_storage_answers_independently() -> None:
    queries, hang = StorageQueries(), threading.Event()
    try:
        found = queries.ask({"c": lambda: str(hang.wait(60)), "b": fails, "a": lambda: "here"}, 0.2)
    finally:
        hang.set()

    assert found["a"] == "here"
    assert isinstance(found["b"], PermissionError)
    assert isinstance(found["c"], NoAnswer) and "no answer for" in str(found["c"])


def test_storage_that_hangs_blocks_one_thread_for_any_number_of_queries() -> None:
    queries, hang, begun = StorageQueries(), threading.Event(), []

    def work() -> str:
        begun.append(threading.current_thread())
        hang.wait(60)
        return f"look {len(begun)}"

    for _ in range(3):
        assert isinstance(queries.ask({"nfs": work}, 0.05)["nfs"], NoAnswer)
    assert len(begun) == 1
    hang.set()

    # The hanging query began earlier and may miss later changes. So a second query is made.
    assert queries.ask({"nfs": work}, 30)["nfs"] == "look 2"
    assert len(begun) == 2


def test_simultaneous_callers_share_a_query() -> None:
    queries, go = StorageQueries(), threading.Event()
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(queries.ask({"a": lambda: go.wait(60)}, 60)["a"]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)

    assert found == [True] * 8
