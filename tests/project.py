"""Copies of the project that are built anew: for a second build beside the first, and for mutated ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import package
import pytest

# What a build reads; the object cache makes the unchanged files cost nothing.
PARTS = ("kernel_src", "torch-ext", "tools", "build.toml", ".build-cache")


def copy(target: Path) -> Path:
    """A buildable copy of the project under test; skips the test where there is only a build."""
    if not (package.REPO / "tools" / "build").is_dir():
        pytest.skip("the builder is not here")
    target.mkdir(parents=True)
    for part in PARTS:
        source = package.REPO / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / part)
    return target


def build(project: Path) -> None:
    """Builds the CPU variant of a copy."""
    child = subprocess.run(
        [sys.executable, "-m", "tools.build", "--variants", "cpu", "--jobs", "2"],
        cwd=project,
        env=package.child_environment(PYTHONPATH=str(project)),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
