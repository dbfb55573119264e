"""What a publication would change: the Hub's branches beside the local files, and the rule of versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .api import broken_promises
from .errors import PublishError
from .remote import HUB_FILE, Remote
from .source import Source


@dataclass(frozen=True)
class Branch:
    """The changes of one branch: files to write, paths to delete, and what stays. `head` is None for a new branch."""

    name: str
    head: str | None
    writes: dict[str, Path | bytes]
    deletes: tuple[str, ...]
    unchanged: int

    @property
    def is_empty(self) -> bool:
        return self.head is not None and not self.writes and not self.deletes

    @property
    def size(self) -> int:
        """Bytes to upload."""
        return sum(size_of(content) for content in self.writes.values())


@dataclass(frozen=True)
class Plan:
    """`version_reason` says why this version may be published as it is."""

    branches: tuple[Branch, ...]
    version_reason: str

    @property
    def is_empty(self) -> bool:
        return all(branch.is_empty for branch in self.branches)


def make_plan(source: Source, remote: Remote) -> Plan:
    """Compares. Raises PublishError where the version rule forbids the publication."""
    version = source.package.version
    reason = _check_version(source, remote)
    # The build first: a card never describes what is not there.
    branches = (
        _compare(f"v{version}", _with_published_labels(source, remote), remote, lambda path: path != HUB_FILE),
        # Of main only the card and the benchmarks are published from here: the rest is somebody else's.
        _compare("main", source.main, remote, lambda path: path.startswith("benchmarks/")),
    )
    return Plan(branches, reason)


def _check_version(source: Source, remote: Remote) -> str:
    version, published = source.package.version, remote.versions()
    newest = max(published, default=None)
    if newest is None:
        return f"version {version} is the first"
    if version < newest:
        raise PublishError(
            f"build.toml says version {version}, but version {newest} is published: a version does not go back"
        )
    if version > newest + 1:
        raise PublishError(f"build.toml says version {version}, but the newest is {newest}: the next is {newest + 1}")
    if version == newest + 1:
        return f"version {version} is new; version {newest} stays as it is"
    promised = remote.api(f"v{version}")
    if promised is None:
        return f"version {version} was begun, and has no variant yet"
    broken = broken_promises(promised, source.api)
    if broken:
        raise PublishError(
            f"version {version} is published, and this is not compatible with it ({'; '.join(broken)}): "
            f"set version = {version + 1} in build.toml and build again"
        )
    return f"version {version} is published, and its API is kept"


def _with_published_labels(source: Source, remote: Remote) -> dict[str, Path | bytes]:
    """The build's files; the metadata of a variant that is published with these very bytes is the published one.

    Every commit gives a variant new metadata, whatever else it changes. What is published names a commit that the same
    bytes were made from, so it stays true, and nobody has to download anything.
    """
    branch, build = f"v{source.package.version}", dict(source.build)
    there = remote.files(branch) if remote.head(branch) else {}
    for variant in source.variants:
        path = f"build/{variant}/metadata.json"
        if path in there:
            published = remote.read(branch, path)
            if _without_commit(published) == _without_commit(source.build[path].read_text()):
                build[path] = published.encode()
    return build


def _without_commit(metadata: str) -> dict | None:
    """A variant's metadata but for the commit of its sources; None for what is not metadata."""
    try:
        fields = json.loads(metadata)
        del fields["provenance"]["kernel"]
    except (ValueError, KeyError, TypeError):
        return None
    return fields


def _compare(name: str, local: dict[str, Path | bytes], remote: Remote, may_be_stale: Callable[[str], bool]) -> Branch:
    head = remote.head(name)
    there = remote.files(name) if head else {}
    writes = {path: content for path, content in local.items() if there.get(path) not in _ids_of(content)}
    stale = tuple(sorted(path for path in there if path not in local and may_be_stale(path)))
    return Branch(name, head, writes, stale, len(local) - len(writes))


def size_of(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _ids_of(content: Path | bytes) -> tuple[str, str]:
    """The ids that the Hub may know a file by: git's, or for large files the sha256."""
    if isinstance(content, Path):
        content = content.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), hashlib.sha256(content).hexdigest()
