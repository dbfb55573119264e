"""What is published: a clean commit, its checked variants, the card and the benchmarks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import jinja2
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..build import BUILDER
from ..build.check import check_variant
from ..build.config import Package, load
from ..build.errors import BuildError
from .api import Api, read_api
from .card import fill_card
from .errors import PublishError

# What all variants of a version may take together, in bytes: an offline image downloads every one of them.
_SIZE_LIMIT = 12_000_000


@dataclass(frozen=True)
class Source:
    """Everything that may go to the Hub. `build` and `main` are the files of the two branches, by their path there."""

    package: Package
    repo_id: str
    commit: str
    variants: tuple[str, ...]
    build: dict[str, Path]
    main: dict[str, Path | bytes]
    api: Api


def collect(root: Path, repo_id: str | None) -> Source:
    """Reads the project at `root`, for `repo_id` or the repository that build.toml names.

    Raises PublishError for a dirty tree, no variants, one that fails a check, and a card that cannot be filled.
    """
    try:
        package = load(root)
    except BuildError as error:
        raise PublishError(str(error)) from error
    repo_id = repo_id or package.repo_id
    if repo_id is None:
        raise PublishError("build.toml has no [general.hub] repo-id: add it, or name one with --repo-id")
    _require_repo_id(repo_id)
    commit = _clean_commit(root)
    folders = sorted(path for path in (root / "build").glob("torch*") if path.is_dir())
    if not folders:
        raise PublishError(f"{root / 'build'} holds no variant: run `make build` first")
    for folder in folders:
        _require_publishable(folder, package, commit)
    variants = tuple(folder.name for folder in folders)
    build = {
        f"build/{folder.name}/{path.relative_to(folder).as_posix()}": path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    size = sum(path.stat().st_size for path in build.values())
    if size > _SIZE_LIMIT:
        raise PublishError(f"the variants take {size / 1e6:.1f} MB together, more than {_SIZE_LIMIT / 1e6:.0f} MB")
    try:
        api = read_api(lambda name: _read(package.python_root / name))
    except (ValueError, SyntaxError) as error:
        raise PublishError(f"{package.python_folder} does not say what it promises: {error}") from error
    benchmarks = {f"benchmarks/{path.name}": path for path in sorted((root / "benchmarks").glob("benchmark*.py"))}
    try:
        card = fill_card(root / "CARD.md", package, repo_id, api, variants, bool(benchmarks))
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise PublishError(f"CARD.md cannot be filled: {error}") from error
    return Source(package, repo_id, commit, variants, build, {"README.md": card.encode(), **benchmarks}, api)


def _require_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PublishError(f"{repo_id!r} is no name of a repository: {error}") from error
    if "/" not in repo_id:
        raise PublishError(f"{repo_id!r} is no name of a kernel repository: it must be of the form org/name")


def _clean_commit(root: Path) -> str:
    if _git(root, "rev-parse", "--is-inside-work-tree") != "true":
        raise PublishError(f"{root} is no git checkout: what is published must name the commit it was made from")
    if changed := _git(root, "status", "--porcelain"):
        first = changed.splitlines()[0].strip()
        raise PublishError(f"the working tree is not clean ({first}): commit or remove it, then build again")
    return _git(root, "rev-parse", "HEAD")


def _git(root: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError as error:
        raise PublishError(f"git does not run ({error}): it names the commit that is published") from error
    return result.stdout.strip() if result.returncode == 0 else ""


def _require_publishable(folder: Path, package: Package, commit: str) -> None:
    """All of the builder's checks, and that this commit and this version are what the variant says of itself."""
    if problems := check_variant(folder):
        raise PublishError(f"{folder.name} fails its checks: {'; '.join(problems)}: build it again")
    metadata = json.loads((folder / "metadata.json").read_text())
    if metadata["version"] != package.version:
        raise PublishError(
            f"{folder.name} is of version {metadata['version']}, but build.toml says {package.version}: build it again"
        )
    provenance = metadata.get("provenance", {})
    kernel, builder = provenance.get("kernel", {}), provenance.get("kernel-builder", {}).get("version", "")
    if kernel.get("dirty", True) or kernel.get("commit") != commit:
        raise PublishError(
            f"{folder.name} was not built from commit {commit[:12]} as it is: run `make build` in the clean tree"
        )
    # Which builder made a variant is for its users to see: this project's marks what it builds.
    if not builder:
        raise PublishError(f"{folder.name} does not say what built it ({BUILDER!r} for a local build): build it again")


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
