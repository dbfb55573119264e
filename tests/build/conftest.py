"""A tiny package, built once for the session; tests work on copies, whose objects are all in the cache they copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from build_tree import Run, Tree

from tools.build.__main__ import main
from tools.build.cuda import NoCuda, find_cuda

TINY = Path(__file__).parent / "tiny"
JOBS = str(min(2, os.cpu_count() or 1))


@pytest.fixture
def build(capsys) -> Callable[..., Run]:
    """Runs the builder in this process on a tree."""

    def run(tree: Tree, *arguments: str) -> Run:
        capsys.readouterr()
        code = main(["--root", str(tree.root), "--jobs", JOBS, *arguments])
        return Run(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Tree:
    """The tiny package with its CPU variant built. Not to be changed."""
    root = tmp_path_factory.mktemp("pristine") / "tiny"
    shutil.copytree(TINY, root)
    assert main(["--root", str(root), "--jobs", JOBS, "--variants", "cpu"]) == 0
    return Tree(root)


@pytest.fixture
def tree(pristine, tmp_path) -> Tree:
    """A copy of the built package, to be changed."""
    shutil.copytree(pristine.root, tmp_path / "tiny", copy_function=shutil.copyfile)
    return Tree(tmp_path / "tiny")


@pytest.fixture(scope="session")
def cuda():
    """The CUDA toolkit of this machine."""
    try:
        return find_cuda()
    except NoCuda as reason:
        pytest.skip(str(reason))
