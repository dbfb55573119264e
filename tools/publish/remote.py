"""A kernel repository on the Hub, through huggingface_hub."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError

from .api import Api, read_api
from .errors import PublishError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .plan import Branch

_KIND = "kernel"

# Where a new version is put together: the loader takes no notice of a branch of this name.
_STAGING = "unpublished"

# The Hub's own file in every branch: which files are large ones.
HUB_FILE = ".gitattributes"

# What the HTTP client raises when there is no answer; which client it is depends on huggingface_hub's release.
_NoAnswer = HfHubHTTPError.__bases__[0]


class Remote:
    """The repository `repo_id`. Every method raises PublishError with one sentence for what the Hub refuses."""

    def __init__(self, repo_id: str, api: HfApi) -> None:
        self.repo_id = repo_id
        self._api = api
        self._heads = self._read_heads()
        self._files: dict[str | None, dict[str, str]] = {}  # of commits, which do not change

    @property
    def exists(self) -> bool:
        return self._heads is not None

    def head(self, branch: str) -> str | None:
        """The commit of a branch, or None."""
        return (self._heads or {}).get(branch)

    def versions(self) -> list[int]:
        names = (re.fullmatch(r"v(\d+)", name) for name in self._heads or ())
        return sorted(int(match[1]) for match in names if match)

    def files(self, branch: str) -> dict[str, str]:
        """Path -> id of every file."""
        commit = self.head(branch)
        if commit not in self._files:
            with explained(self.repo_id):
                entries = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit, repo_type=_KIND)
                self._files[commit] = {
                    entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id
                    for entry in entries
                    if hasattr(entry, "blob_id")
                }
        return self._files[commit]

    def api(self, branch: str) -> Api | None:
        """The API that a version's variants have in common, as they hold the same Python files; None without any."""
        paths = self.files(branch)
        variant = next((path.split("/")[1] for path in sorted(paths) if path.startswith("build/")), None)
        if variant is None:
            return None

        def read(name: str) -> str | None:
            path = f"build/{variant}/{name}"
            return self.read(branch, path) if path in paths else None

        try:
            return read_api(read)
        except (ValueError, SyntaxError) as error:
            raise PublishError(
                f"what {branch} of {self.repo_id} promises cannot be read from its {variant} ({_one_line(error)}): "
                "publish as the next version"
            ) from error

    def read(self, branch: str, path: str) -> str:
        """The text of a file of a branch."""
        with explained(self.repo_id):
            file = self._api.hf_hub_download(self.repo_id, path, revision=self.head(branch), repo_type=_KIND)
        return Path(file).read_text(encoding="utf-8")

    def create(self) -> None:
        with explained(self.repo_id):
            self._api.create_repo(self.repo_id, repo_type=_KIND, exist_ok=True)
        self._heads = self._read_heads()

    def commit(self, branch: Branch, message: str) -> None:
        """All changes of a branch in one commit, on top of the head that the plan was made for.

        A new branch appears with its content: a branch of a version that has no variant would be a version to the
        loader, and one that nobody can load.
        """
        if branch.head is not None:
            self._commit(branch.name, branch.writes, branch.deletes, message, branch.head)
            return
        with explained(self.repo_id):
            self._api.create_branch(self.repo_id, branch=_STAGING, repo_type=_KIND, exist_ok=True)
        self._heads = self._read_heads()
        inherited = set(self.files(_STAGING)) - set(branch.writes) - {HUB_FILE}
        commit = self._commit(_STAGING, branch.writes, sorted(inherited), message, self.head(_STAGING))
        with explained(self.repo_id):
            self._api.create_branch(self.repo_id, branch=branch.name, revision=commit, repo_type=_KIND)
            self._api.delete_branch(self.repo_id, branch=_STAGING, repo_type=_KIND)

    def _commit(self, branch: str, writes: dict[str, Path | bytes], deletes: Iterable[str], message: str, parent: str):
        """The new head of a branch that was at `parent`."""
        operations = [
            *(CommitOperationAdd(path, content) for path, content in writes.items()),
            *(CommitOperationDelete(path) for path in deletes),
        ]
        with explained(self.repo_id):
            return self._api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                repo_type=_KIND,
                revision=branch,
                parent_commit=parent,
            ).oid

    def _read_heads(self) -> dict[str, str] | None:
        """Branch -> commit; None if there is no such repository."""
        with explained(self.repo_id):
            try:
                refs = self._api.list_repo_refs(self.repo_id, repo_type=_KIND)
            except RepositoryNotFoundError:
                self._refuse_other_kinds()
                return None
        return {branch.name: branch.target_commit for branch in refs.branches}

    def _refuse_other_kinds(self) -> None:
        for kind in ("model", "dataset", "space"):
            if self._api.repo_exists(self.repo_id, repo_type=kind):
                raise PublishError(
                    f"{self.repo_id} is a {kind} repository, but must be one of type kernel: name another one"
                )


@contextmanager
def explained(repo_id: str):
    """Turns what can go wrong on the way to the Hub into one sentence."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise PublishError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise PublishError(
                f"the Hub refuses the token for {repo_id} ({status}): it must be valid and allowed to write there; an "
                "organization also needs the Hub's approval for kernel repositories"
            ) from error
        if status in (409, 412):
            raise PublishError(f"{repo_id} was changed by somebody else meanwhile: run this again") from error
        raise PublishError(f"the Hub answers for {repo_id}: {_one_line(error)}") from error
    except (OSError, RuntimeError, _NoAnswer) as error:
        # huggingface_hub reports an upload that broke off as a RuntimeError, caused by what happened.
        if isinstance(error, RuntimeError) and not isinstance(error.__cause__, (OSError, _NoAnswer)):
            raise
        raise PublishError(
            f"the Hub cannot be reached ({_one_line(error)}): check the network, then run this again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
