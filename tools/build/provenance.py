"""Which commit a variant was built from, and whether its inputs were committed."""

from __future__ import annotations

import subprocess
from pathlib import Path


def kernel_commit(root: Path, inputs: list[str]) -> dict[str, str | bool] | None:
    """{"commit", "dirty"} of the repository that tracks root/build.toml; None outside of git or before a first commit.

    Dirty means that a tracked file differs from the commit, or that one of `inputs` (relative to root) is untracked.
    """
    commit = _git(root, "rev-parse", "HEAD")
    # A checkout may lie inside another repository that knows nothing of it.
    if commit is None or _git(root, "ls-files", "--error-unmatch", "build.toml") is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    untracked = _git(root, "ls-files", "--others", "--", *inputs)
    return {"commit": commit, "dirty": bool(changed or untracked)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None
