"""Paths of everstep's files that are not Python modules: in the checkout, or in the installed package."""

from __future__ import annotations

from pathlib import Path

INSTALLED = Path(__file__).resolve().parent / "installed"
CHECKOUT = Path(__file__).resolve().parents[1]


def file_of_ours(path: str) -> Path:
    """The path of a file or folder, e.g. ``examples/gpt.py``; it may be missing."""
    return INSTALLED / path if INSTALLED.is_dir() else CHECKOUT / path
