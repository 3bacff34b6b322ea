"""Files of everstep that are no modules: of the checkout, or beside this module where a wheel was installed."""

from __future__ import annotations

from pathlib import Path

INSTALLED = Path(__file__).resolve().parent / "installed"
CHECKOUT = Path(__file__).resolve().parents[1]


def file_of_ours(path: str) -> Path:
    """Where a file or folder lies, e.g. ``examples/gpt.py``; it may be missing."""
    return INSTALLED / path if INSTALLED.is_dir() else CHECKOUT / path
