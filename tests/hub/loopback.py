"""A Hub on the loopback: repositories as commits on disk, behind the requests of kernels and huggingface_hub.

Objects and commits are never changed; a branch is one small file that is replaced in one step, so that a client sees
the commit before or the commit after. `Hub.faults` makes the server misbehave on purpose.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"


class NotFound(Exception):
    """What a 404 says: one of the Hub's X-Error-Code values."""


class Conflict(Exception):
    """The branch is not where the client believes it is, or something is there already."""


@dataclass
class Faults:
    """How the server misbehaves. Patterns are searched in the request's path."""

    cut_short: str = ""  # downloads whose connection closes after half of the content
    damaged: str = ""  # downloads with one byte changed
    dead: str = ""  # requests whose connection closes without an answer

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
        self._move(repo, "main", self._store(repo, {}, None, "initial commit"))

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

    def commit(
        self, repo: str, branch: str, adds: dict[str, bytes], deletes: list[str], message: str, parent: str | None
    ) -> str:
        """One commit with all changes. Raises Conflict if `parent` is given and not the branch's head."""
        head = self.resolve(repo, branch)
        if parent is not None and parent != head:
            raise Conflict(f"{branch} has moved on from {parent}")
        files = self.files(repo, head)
        for path in deletes:
            files = {name: sha for name, sha in files.items() if name != path and not name.startswith(f"{path}/")}
        for path, content in adds.items():
            files[path] = self._object(content)
        commit = self._store(repo, files, head, message)
        self._move(repo, branch, commit)
        return commit

    def snapshot(self, repo: str) -> dict[str, dict[str, str]]:
        """All branches with all files: equal before and after means that nothing was changed."""
        return {name: {"": commit, **self.files(repo, commit)} for name, commit in self.refs(repo).items()}

    def _place(self, repo: str) -> Path:
        return self.root / "repos" / repo.replace("/", "--")

    def _commit_file(self, repo: str, commit: str) -> Path:
        return self._place(repo) / f"{commit}.json"

    def _object(self, content: bytes) -> str:
        sha = hashlib.sha256(content).hexdigest()
        _write(self.root / "objects" / sha, content)
        return sha

    def _store(self, repo: str, files: dict[str, str], parent: str | None, message: str) -> str:
        text = json.dumps({"files": files, "parent": parent, "message": message}, sort_keys=True)
        commit = hashlib.sha1(text.encode()).hexdigest()
        _write(self._commit_file(repo, commit), text.encode())
        return commit

    def _move(self, repo: str, branch: str, commit: str) -> None:
        _write(self._place(repo) / "refs" / branch.replace("/", "%2F"), commit.encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_ident()}")
    partial.write_bytes(content)
    partial.replace(path)


def git_oid(content: bytes) -> str:
    """The id that git gives to a file, and the Hub to what is not in large-file storage."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(root: Path, trusted: set[str]):
    """A Hub that answers on a free port of the loopback until the context ends."""
    hub = Hub(root, trusted)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


_API = re.compile(r"/api/kernels/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>\w[\w-]*)(?:/(?P<rest>.*))?)?$")
_OTHER_API = re.compile(r"/api/(?P<kind>model|dataset|space)s/(?P<repo>[^/]+/[^/]+)$")
_RESOLVE = re.compile(r"/kernels/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)$")


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, handle) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        if Faults.hits(self.hub.faults.dead, path):
            self.close_connection = True
            self.connection.close()
            return
        try:
            handle(path)
        except NotFound as error:
            self._json({"error": str(error)}, 404, {"X-Error-Code": str(error), "X-Error-Message": str(error)})
        except Conflict as error:
            self._json({"error": str(error), "url": f"{self.hub.url}/kernels"}, 409)

    # ---- reading ----

    def _get(self, path: str) -> None:
        hub = self.hub
        if match := re.fullmatch(r"/api/organizations/([^/]+)/overview", path):
            self._json({"name": match[1], "trustedKernelPublisher": match[1] in hub.trusted})
        elif match := _RESOLVE.match(path):
            self._file(match["repo"], unquote(match["rev"]), unquote(match["path"]))
        elif match := _OTHER_API.match(path):
            if hub.kind(match["repo"]) != match["kind"]:
                raise NotFound("RepoNotFound")
            self._json({"id": match["repo"], "sha": "0" * 40, "private": False})
        elif match := _API.match(path):
            self._api(match["repo"], match["what"], unquote(match["rest"] or ""))
        else:
            raise NotFound("EntryNotFound")

    def _api(self, repo: str, what: str | None, rest: str) -> None:
        hub = self.hub
        if what is None or what == "revision":
            commit = hub.resolve(repo, rest or "main")
            siblings = [{"rfilename": name} for name in hub.files(repo, commit)]
            self._json({"id": repo, "sha": commit, "private": False, "siblings": siblings})
        elif what == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in hub.refs(repo).items()]
            self._json({"branches": branches, "converts": [], "tags": []})
        elif what == "tree":
            self._tree(repo, rest)
        else:
            raise NotFound("EntryNotFound")

    def _tree(self, repo: str, rest: str) -> None:
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        heads = "refs/heads/"
        revision, _, below = rest.removeprefix(heads).partition("/")
        files = self.hub.files(repo, revision)
        prefix = f"{below}/" if below else ""
        entries, folders = [], set()
        for name, sha in sorted(files.items()):
            if not name.startswith(prefix):
                continue
            inner = name[len(prefix) :].split("/")
            ends = range(1, len(inner)) if recursive else range(1, min(2, len(inner)))
            folders.update(prefix + "/".join(inner[:end]) for end in ends)
            if recursive or len(inner) == 1:
                content = self.hub.content(sha)
                entries.append({"type": "file", "path": name, "size": len(content), "oid": git_oid(content)})
        if below and not entries and not folders:
            raise NotFound("EntryNotFound")
        directories = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(folders)]
        self._json(directories + entries)

    def _file(self, repo: str, revision: str, name: str) -> None:
        commit = self.hub.resolve(repo, revision)
        files = self.hub.files(repo, commit)
        if name not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            self._json({"error": "EntryNotFound"}, 404, headers)
            return
        content = self.hub.content(files[name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_oid(content)}"', "Accept-Ranges": "none"}
        if self.command == "GET" and Faults.hits(self.hub.faults.damaged, name):
            content = bytes([content[0] ^ 1]) + content[1:]
        self._send(200, content, "application/octet-stream", headers, Faults.hits(self.hub.faults.cut_short, name))

    # ---- writing ----

    def _post(self, path: str) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
            return
        if path == "/api/repos/create":
            asked = json.loads(self.body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.create(repo, asked.get("type", "model"))
            self._json({"url": f"{self.hub.url}/kernels/{repo}", "name": repo})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := _API.match(path):
            self._change(match["repo"], match["what"], unquote(match["rest"] or ""))
        else:
            raise NotFound("EntryNotFound")

    def _change(self, repo: str, what: str, rest: str) -> None:
        if what == "branch":
            self.hub.branch(repo, rest, json.loads(self.body or b"{}").get("startingPoint"))
            self._json({})
        elif what == "preupload":
            files = self.hub.files(repo, rest)
            known = {name: git_oid(self.hub.content(sha)) for name, sha in files.items()}
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self._json({"files": [{"path": path, "oid": known.get(path), **mode} for path in paths]})
        elif what == "commit":
            lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            adds = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            deletes = [line["value"]["path"] for line in lines if line["key"] in ("deletedFile", "deletedFolder")]
            parent = header.get("parentCommit")
            commit = self.hub.commit(repo, rest, adds, deletes, header["summary"], parent)
            self._json({"commitOid": commit, "commitUrl": f"{self.hub.url}/kernels/{repo}/commit/{commit}"})
        else:
            raise NotFound("EntryNotFound")

    # ---- answers ----

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers or {}, False)

    def _send(self, status: int, content: bytes, kind: str, headers: dict[str, str], cut_short: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: len(content) // 2] if cut_short else content)
        if cut_short:
            self.close_connection = True
