"""Why the newest state that is left is none to go on from."""

from __future__ import annotations


def distrusted(step: int, trusted: int | None, limit: int | None, headline: str) -> str:
    """Why a restart would be in vain: no older state is left; empty: it would not.

    Args:
        step: Where it would go on.
        trusted: The newest step that the version that runs can go on from; None: any.
        limit: The newest step without the fault that was seen; None: any.
        headline: That fault.
    """
    if trusted is not None and step < 1 <= trusted:
        return (
            "the version that runs cannot restore what a later one saved that was taken back, and no checkpoint of "
            f"step {trusted} or before is left that all ranks can restore: update the job to code that can"
        )
    if limit is None or step <= limit:
        return ""
    before = f"of step {limit} or before" if limit > 0 else "from before that"
    return (
        f"{headline}, and no checkpoint {before} is left that all ranks can restore: the newest one, "
        f"of step {step}, has the fault in it. Resume goes on from that one all the same"
    )
