"""Repositories of a Hub as commits on disk, and how the server in front of them misbehaves on purpose.

Objects and commits are never changed; a branch is one small file that is replaced in one step, so that a client sees
the commit before or the commit after.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote


class NotFound(Exception):
    """What a 404 says: one of the Hub's X-Error-Code values."""


class Conflict(Exception):
    """Something is there already."""


class Moved(Exception):
    """The branch is not where the client believes it is."""


# What the Hub puts into a new repository.
_ATTRIBUTES = b"*.so filter=lfs diff=lfs merge=lfs -text\n"


@dataclass
class Faults:
    """How the server misbehaves. Patterns are searched in the request's method and path, "PUT /objects/..."."""

    cut_short: str = ""  # downloads whose connection closes after half of the content
    damaged: str = ""  # downloads with one byte changed
    dead: str = ""  # requests whose connection closes without an answer, half-way through what is uploaded

    @staticmethod
    def hits(pattern: str, path: str) -> bool:
        return bool(pattern) and re.search(pattern, path) is not None


@dataclass
class Hub:
    """Repositories below `root`, and who may publish what."""

    root: Path
    trusted: set[str] = field(default_factory=set)
    faults: Faults = field(default_factory=Faults)
    requests: list[str] = field(default_factory=list)  # "GET /api/..." in the order of their arrival
    url: str = ""

    # ---- storage ----

    def create(self, repo: str, kind: str = "kernel") -> None:
        place = self._place(repo)
        if place.exists():
            raise Conflict(f"{repo} exists")
        (place / "refs").mkdir(parents=True)
        (place / "kind").write_text(kind)
        start = {".gitattributes": self.keep(_ATTRIBUTES)}
        self._move(repo, "main", self._store(repo, start, None, "initial commit"))

    def kind(self, repo: str) -> str | None:
        """The type of a repository; None if there is none."""
        file = self._place(repo) / "kind"
        return file.read_text() if file.exists() else None

    def refs(self, repo: str) -> dict[str, str]:
        """Branch -> commit."""
        if self.kind(repo) != "kernel":
            raise NotFound("RepoNotFound")
        return {unquote(path.name): path.read_text() for path in sorted((self._place(repo) / "refs").iterdir())}

    def branch(self, repo: str, name: str, start: str | None = None) -> None:
        refs = self.refs(repo)
        if name in refs:
            raise Conflict(f"branch {name} exists")
        self._move(repo, name, self.resolve(repo, start or "main"))

    def delete_branch(self, repo: str, name: str) -> None:
        if name not in self.refs(repo):
            raise NotFound("RevisionNotFound")
        self._ref(repo, name).unlink()

    def resolve(self, repo: str, revision: str) -> str:
        refs = self.refs(repo)
        revision = revision.removeprefix("refs/heads/")
        if revision in refs:
            return refs[revision]
        if re.fullmatch(r"[0-9a-f]{40}", revision) and self._commit_file(repo, revision).exists():
            return revision
        raise NotFound("RevisionNotFound")

    def files(self, repo: str, revision: str) -> dict[str, str]:
        """Path -> sha256 of its content."""
        return json.loads(self._commit_file(repo, self.resolve(repo, revision)).read_text())["files"]

    def content(self, sha256: str) -> bytes:
        return (self.root / "objects" / sha256).read_bytes()

    def has(self, sha256: str) -> bool:
        return (self.root / "objects" / sha256).exists()

    def keep(self, content: bytes) -> str:
        """Stores an object; its sha256."""
        sha = hashlib.sha256(content).hexdigest()
        _write(self.root / "objects" / sha, content)
        return sha

    @staticmethod
    def is_large(name: str) -> bool:
        """Whether a file is uploaded on its own, and git has but a pointer to it."""
        return name.endswith(".so")

    def commit(
        self, repo: str, branch: str, adds: dict[str, str], deletes: list[str], message: str, parent: str | None
    ) -> str:
        """One commit with all changes; `adds` are objects by path. Raises Moved if `parent` is not the head."""
        head = self.resolve(repo, branch)
        if parent is not None and parent != head:
            raise Moved(f"{branch} has moved on from {parent}")
        files = self.files(repo, head)
        for path in deletes:
            files = {name: sha for name, sha in files.items() if name != path and not name.startswith(f"{path}/")}
        commit = self._store(repo, files | adds, head, message)
        self._move(repo, branch, commit)
        return commit

    def snapshot(self, repo: str) -> dict[str, dict[str, str]]:
        """All branches with all files: equal before and after means that nothing was changed."""
        return {name: {"": commit, **self.files(repo, commit)} for name, commit in self.refs(repo).items()}

    def _place(self, repo: str) -> Path:
        return self.root / "repos" / repo.replace("/", "--")

    def _commit_file(self, repo: str, commit: str) -> Path:
        return self._place(repo) / f"{commit}.json"

    def _store(self, repo: str, files: dict[str, str], parent: str | None, message: str) -> str:
        text = json.dumps({"files": files, "parent": parent, "message": message}, sort_keys=True)
        commit = hashlib.sha1(text.encode()).hexdigest()
        _write(self._commit_file(repo, commit), text.encode())
        return commit

    def _ref(self, repo: str, branch: str) -> Path:
        return self._place(repo) / "refs" / branch.replace("/", "%2F")

    def _move(self, repo: str, branch: str, commit: str) -> None:
        _write(self._ref(repo, branch), commit.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_ident()}")
    partial.write_bytes(content)
    partial.replace(path)


def pointer(content: bytes) -> bytes:
    """What git keeps in place of a large file."""
    sha = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(content)}\n".encode()


def git_oid(content: bytes) -> str:
    """The id that git gives to a file, and the Hub to what is not in large-file storage."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
