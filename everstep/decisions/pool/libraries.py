"""Whether a machine has the same libraries as the others of a job: ranks compute the same only with the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def differing(here: Mapping[str, str], elsewhere: Iterable[Mapping[str, str]]) -> str:
    """What a machine has in other versions than all the others, for people; empty: nothing, as far as it is known.

    Args:
        here: Its libraries, by name, with versions.
        elsewhere: Those of the others.
    """
    others = list(elsewhere)
    found = []
    for name, version in sorted(here.items()):
        versions = {other[name] for other in others if name in other}
        if versions and version not in versions:
            found.append(f"{name} {version} instead of {' or '.join(sorted(versions))}")
    return ", ".join(found)
