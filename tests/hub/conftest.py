"""A published project on a loopback Hub, and child processes with empty caches that use it as a user would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loopback import Hub, serve
from users import PARTS, ROOT, Project, child_environment, run


@pytest.fixture(scope="session")
def pristine_project(tmp_path_factory) -> Project:
    """The project, committed, with its CPU and noarch variants. Not to be changed."""
    if torch.version.cuda is not None:
        pytest.skip("the loader takes CUDA variants only under this torch, and building one takes minutes")
    if not (ROOT / "tools" / "publish").is_dir():
        pytest.skip("the publisher is not here")
    root = tmp_path_factory.mktemp("project") / "geglu"
    root.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, root / part)
    (root / ".gitignore").write_text("build/\n.build-cache/\n__pycache__/\n/torch-ext/registration.h\n")
    project = Project(root)
    run("git", "init", "-q", cwd=root)
    project.commit()
    project.build("cpu,noarch")
    return project


@pytest.fixture
def project(pristine_project, tmp_path) -> Project:
    """A copy of the project, to be changed."""
    shutil.copytree(pristine_project.root, tmp_path / "geglu", symlinks=True)
    return Project(tmp_path / "geglu")


@pytest.fixture(scope="session")
def shared_hub(pristine_project, tmp_path_factory) -> Hub:
    """A Hub with version 1 of the project, from an organization that is trusted. Not to be changed."""
    with serve(tmp_path_factory.mktemp("hub"), trusted={"org"}) as hub:
        pristine_project.publish(hub, "--yes")
        yield hub


@pytest.fixture
def hub(shared_hub, tmp_path) -> Hub:
    """A Hub with the same content, to be changed."""
    shutil.copytree(shared_hub.root, tmp_path / "hub")
    with serve(tmp_path / "hub", trusted={"org"}) as served:
        yield served


@pytest.fixture
def empty_hub(tmp_path) -> Hub:
    with serve(tmp_path / "empty-hub", trusted={"org"}) as served:
        yield served


@pytest.fixture
def python(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a program in a fresh process whose caches lie in `home` (default: empty ones)."""
    homes = iter(range(1000))

    def run_program(hub: Hub, program: str, home: Path | None = None, code: int | None = 0, **changes: str):
        home = home or tmp_path / f"home{next(homes)}"
        environment = child_environment(hub, home, **changes)
        return run(sys.executable, "-c", textwrap.dedent(program), env=environment, code=code)

    return run_program


@pytest.fixture
def command(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a program that is installed beside this Python: `kernels` or `hf`."""

    def run_command(hub: Hub, name: str, *arguments: object, home: Path, code: int | None = 0, **changes: str):
        program = Path(sys.executable).with_name(name)
        return run(program, *arguments, env=child_environment(hub, home, **changes), code=code)

    return run_command
