"""A real git repository for a test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Repository:
    """A git repository in a new folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """Run git in the repository; returns its output."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        names = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        for who in ("AUTHOR", "COMMITTER"):
            names |= {f"GIT_{who}_NAME": "Ada", f"GIT_{who}_EMAIL": "ada@example.org"}
        ended = subprocess.run(
            ["git", *arguments], cwd=self.folder, env=kept | names, capture_output=True, text=True, check=True
        )
        return ended.stdout

    def write(self, **files: str) -> None:
        """Write files; in their names ``__`` is a slash, ``_py`` is ``.py`` and ``_gitignore`` is ``.gitignore``."""
        for name, text in files.items():
            path = self.folder / name.replace("__", "/").replace("_py", ".py").replace("_gitignore", ".gitignore")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def commit(self, message: str) -> str:
        """Commit all files; returns the commit's id."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD").strip()
