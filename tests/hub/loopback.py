"""A Hub on the loopback: the requests of kernels and huggingface_hub, answered from the repositories of store.py.

Large files take the way of Git LFS, as the Hub asks for with libraries. The Hub's own storage, Xet, is not here:
clients are told so by HF_HUB_DISABLE_XET.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from store import Conflict, Faults, Hub, Moved, NotFound, git_oid, pointer

TOKEN = "hf_loopback"


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
_LARGE = re.compile(r"/kernels/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/(?P<what>batch|verify)$")
_OBJECT = re.compile(r"/objects/(?P<sha>[0-9a-f]{64})$")
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
        self._answer(self._authorized)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._authorized)

    def _answer(self, handle) -> None:
        path = urlsplit(self.path).path
        self.asked = f"{self.command} {path}"
        self.hub.requests.append(self.asked)
        length = int(self.headers.get("Content-Length") or 0)
        if Faults.hits(self.hub.faults.dead, self.asked):
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        self.body = self.rfile.read(length) if length else b""
        try:
            handle(path)
        except NotFound as error:
            self._json({"error": str(error)}, 404, {"X-Error-Code": str(error), "X-Error-Message": str(error)})
        except Conflict as error:
            self._json({"error": str(error), "url": f"{self.hub.url}/kernels"}, 409)
        except Moved as error:
            self._json({"error": str(error)}, 412)

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
                entry = {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
                if self.hub.is_large(name):
                    text = pointer(content)
                    entry |= {"oid": git_oid(text)}
                    entry |= {"lfs": {"oid": sha, "size": len(content), "pointerSize": len(text)}}
                entries.append(entry)
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
        if self.hub.is_large(name):
            headers |= {"X-Linked-ETag": f'"{files[name]}"', "X-Linked-Size": str(len(content))}
        if self.command == "GET" and Faults.hits(self.hub.faults.damaged, self.asked):
            content = bytes([content[0] ^ 1]) + content[1:]
        cut_short = Faults.hits(self.hub.faults.cut_short, self.asked)
        self._send(200, content, "application/octet-stream", headers, cut_short)

    # ---- writing ----

    def _authorized(self, path: str) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
        elif self.command == "DELETE":
            self._delete(path)
        else:
            self._post(path)

    def _delete(self, path: str) -> None:
        match = _API.match(path)
        if match is None or match["what"] != "branch":
            raise NotFound("EntryNotFound")
        self.hub.delete_branch(match["repo"], unquote(match["rest"]))
        self._json({})

    def _put(self, path: str) -> None:
        """The content of a large file, at the address that the answer to its announcement gave."""
        match = _OBJECT.match(path)
        if match is None:
            raise NotFound("EntryNotFound")
        if self.hub.keep(self.body) != match["sha"]:
            raise Conflict(f"the content of {match['sha']} is another")
        self._json({})

    def _post(self, path: str) -> None:
        if path == "/api/repos/create":
            asked = json.loads(self.body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.create(repo, asked.get("type", "model"))
            self._json({"url": f"{self.hub.url}/kernels/{repo}", "name": repo})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := _LARGE.match(path):
            self._announced(match["repo"], match["what"])
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
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            self._json({"files": [self._upload_mode(path, files.get(path)) for path in paths]})
        elif what == "commit":
            lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            adds = {
                line["value"]["path"]: self.hub.keep(base64.b64decode(line["value"]["content"]))
                for line in lines
                if line["key"] == "file"
            }
            adds |= {line["value"]["path"]: line["value"]["oid"] for line in lines if line["key"] == "lfsFile"}
            if not all(self.hub.has(sha) for sha in adds.values()):
                raise NotFound("EntryNotFound")
            deletes = [line["value"]["path"] for line in lines if line["key"] in ("deletedFile", "deletedFolder")]
            parent = header.get("parentCommit")
            commit = self.hub.commit(repo, rest, adds, deletes, header["summary"], parent)
            self._json({"commitOid": commit, "commitUrl": f"{self.hub.url}/kernels/{repo}/commit/{commit}"})
        else:
            raise NotFound("EntryNotFound")

    def _upload_mode(self, path: str, sha: str | None) -> dict:
        large = self.hub.is_large(path)
        known = None if sha is None else sha if large else git_oid(self.hub.content(sha))
        return {"path": path, "oid": known, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def _announced(self, repo: str, what: str) -> None:
        """Large files that will come: where each may be put, unless it is here. Afterwards: whether it came."""
        asked = json.loads(self.body)
        if what == "verify":
            if not self.hub.has(asked["oid"]):
                raise NotFound("EntryNotFound")
            self._json({})
            return
        verify = {"href": f"{self.hub.url}/kernels/{repo}.git/info/lfs/objects/verify"}
        answers = []
        for announced in asked["objects"]:
            answer = {"oid": announced["oid"], "size": announced["size"]}
            if not self.hub.has(announced["oid"]):
                place = {"href": f"{self.hub.url}/objects/{announced['oid']}"}
                answer["actions"] = {"upload": place, "verify": verify}
            answers.append(answer)
        self._json({"transfer": "basic", "objects": answers})

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
