"""Who takes part in the tests of the Hub: a checkout that publishes, and processes with caches of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import package
from loopback import TOKEN, Hub

ROOT = Path(__file__).parents[2]
REPO = "org/geglu"
CPU = "torch-stable-abi210-cpu-x86_64-linux"
NOARCH = ("torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu")
# The Hub puts it into every branch, and it stays there.
HUBS_OWN = {".gitattributes"}

# What publishing and building read.
PARTS = ("kernel_src", "torch-ext", "tools", "benchmarks", "build.toml", "CARD.md", "README.md", ".build-cache")
_GIT = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")


def variants_of(files) -> set[str]:
    return {name.split("/")[1] for name in files if name.startswith("build/")}


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None, code: int | None = 0):
    """A finished child process; `code` is the exit code that it must have, None for any."""
    child = subprocess.run(
        [str(part) for part in command], env=env, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert code is None or child.returncode == code, child.stdout + child.stderr
    return child


class Project:
    """A git checkout of the project that can be built and published."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def commit(self) -> None:
        run("git", "add", "-A", cwd=self.root)
        run("git", *_GIT, "commit", "-q", "-m", "state", cwd=self.root)

    def build(self, variants: str) -> None:
        environment = package.child_environment(PYTHONPATH=str(self.root))
        run(sys.executable, "-m", "tools.build", "--variants", variants, env=environment, cwd=self.root)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces what is there exactly once."""
        path = self.root / name
        assert path.read_text().count(old) == 1, f"{old!r} is not once in {name}"
        path.write_text(path.read_text().replace(old, new))

    def publish(self, hub: Hub, *arguments: str, code: int = 0, token: str | None = TOKEN, **changes: str):
        """The command line of tools.publish against a Hub."""
        home = self.root.parent / "publisher"
        environment = child_environment(hub, home, PYTHONPATH=str(self.root), **changes)
        if token:
            environment["HF_TOKEN"] = token
        command = (sys.executable, "-m", "tools.publish", *arguments)
        return run(*command, env=environment, cwd=self.root, code=code)


def child_environment(hub: Hub, home: Path, **changes: str) -> dict[str, str]:
    """An environment in which the Hub is the loopback's and every cache lies below `home`.

    HF_HUB_DISABLE_TELEMETRY stays unset: with it, kernels 0.17.2 sends a header that its HTTP client refuses.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNELS_", "LOCAL_"))}
    return {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        **changes,
    }


def change_python(project) -> None:
    """Another build of every variant: a comment in a Python file makes its bytes and its id others."""
    project.edit("torch-ext/geglu/formula.py", '"""Whether a host', '"""If a host')
    rebuild(project)


def rebuild(project) -> None:
    project.commit()
    project.build("cpu,noarch")


def bump(project, version: int) -> None:
    project.edit("build.toml", "\nversion = 1\n", f"\nversion = {version}\n")
    rebuild(project)
