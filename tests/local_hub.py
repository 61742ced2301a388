"""A hub on this machine that speaks the API of huggingface.co, with a content delivery server on another port, for hub_test.py.

Faults are injected with Hub.fault, a function that receives every request and may answer it.
"""
import hashlib
import http.server
import json
import re
import threading
import urllib.parse


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class File:
    """Contents of a file in a repository. Files in `large` storage are redirected to the CDN and named by their SHA-256."""

    def __init__(self, data, large=None, claimed=None):
        self.data = data
        self.large = len(data) > 100_000 if large is None else large
        self.size = len(data) if claimed is None else claimed  # `claimed` simulates a huge file without its data
        self.id = hashlib.sha256(data).hexdigest() if self.large else git_sha1(data)


class Repository:
    def __init__(self, files, gated=False, token=None):
        self.files = {name: file if isinstance(file, File) else File(file) for name, file in files.items()}
        self.gated = gated
        self.token = token  # token that a client needs to read the files, or None
        self.commit = hashlib.sha1(repr(sorted((n, f.id) for n, f in self.files.items())).encode()).hexdigest()

    def listing(self, name):
        siblings = []
        for path, file in self.files.items():
            entry = {"rfilename": path, "size": file.size, "blobId": file.id if not file.large else git_sha1(b"pointer " + file.id.encode())}
            if file.large:
                entry["lfs"] = {"sha256": file.id, "size": file.size, "pointerSize": 134}
            siblings.append(entry)
        return {"_id": "0", "id": name, "modelId": name, "sha": self.commit, "gated": "manual" if self.gated else False, "private": False,
                "disabled": False, "tags": ["gguf"], "downloads": 1, "likes": 0, "siblings": siblings}

    def tree(self):
        entries = []
        for path, file in self.files.items():
            entry = {"type": "file", "oid": file.id if not file.large else git_sha1(b"pointer"), "size": file.size, "path": path}
            if file.large:
                entry["lfs"] = {"oid": file.id, "size": file.size, "pointerSize": 134}
            entries.append(entry)
        return entries


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    @property
    def hub(self):
        return self.server.hub

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def drop(self, declared, body=b""):
        """Declares a length, sends less, and closes the connection."""
        self.send_response(200)
        self.send_header("Content-Length", str(declared))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.close_connection = True

    def range_of(self, size):
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not match or not self.hub.ranges:
            return None
        return int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)

    def send_file(self, file, **headers):
        wanted = self.range_of(file.size)
        start, end = wanted or (0, file.size)
        body = file.data[start:end]
        if wanted is None and len(body) < file.size:
            body += b"\0" * (min(file.size, 1 << 24) - len(body))
        if wanted:
            body += b"\0" * (end - start - len(body))
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{file.size}"
        self.reply(206 if wanted else 200, body, Accept_Ranges="bytes", **headers)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.hub
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        with hub.lock:
            hub.requests.append((self.server.role, self.command, path, dict(self.headers)))
        try:
            if hub.fault is None or not hub.fault(self, self.server.role, path):
                (self.get_cdn if self.server.role == "cdn" else self.get_hub)(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def get_cdn(self, path):
        for repository in self.hub.repositories.values():
            for file in repository.files.values():
                if path == f"/signed/{file.id}":
                    return self.send_file(file)
        return self.reply(404)

    def get_hub(self, path):
        hub = self.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        match = (re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+)|/tree/(.+))?", path)
                 or re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path))
        name = match and match[1]
        if match and name in hub.renamed:
            new = path.replace(name, hub.renamed[name])
            return self.reply(307, b"", Location=new + "?blobs=true")
        if not match or name not in hub.repositories:
            return self.reply(401 if not token else 404, b'{"error": "Repository not found"}', X_Error_Code="RepoNotFound")
        repository = hub.repositories[name]
        other = [r for (repo, revision), r in hub.revisions.items() if repo == name and match[2] in (revision, r.commit)]
        if other:
            repository = other[0]
        elif path.startswith("/api/") and match[2] not in (None, "main", repository.commit):
            return self.reply(404, b'{"error": "Invalid rev id"}', X_Error_Code="RevisionNotFound")
        if path.startswith("/api/"):
            answer = repository.tree() if match[3] else repository.listing(name)
            return self.reply(200, json.dumps(answer).encode(), Content_Type="application/json")
        if repository.gated and token != repository.token:
            return self.reply(403 if token else 401, b"gated", X_Error_Code="GatedRepo")
        if match[2] not in (repository.commit, "main") or match[3] not in repository.files:
            return self.reply(404, b"", X_Error_Code="EntryNotFound")
        file = repository.files[match[3]]
        about = {"ETag": f'"{file.id}"', "X_Repo_Commit": repository.commit}
        if file.large:
            return self.reply(302, b"", Location=f"{hub.cdn}/signed/{file.id}", X_Linked_Etag=f'"{file.id}"', X_Linked_Size=str(file.size), **about)
        return self.send_file(file, **about)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, hub, role):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub
        self.role = role
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Hub:
    def __init__(self, repositories=None):
        self.repositories = repositories or {}
        self.renamed = {}
        self.revisions = {}  # (repository, branch or tag) -> Repository
        self.ranges = True  # servers support range requests
        self.fault = None
        self.requests = []
        self.lock = threading.Lock()
        self.servers = [Server(self, "hub"), Server(self, "cdn")]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{s.server_address[1]}" for s in self.servers)

    def count(self, role, words=""):
        with self.lock:
            return sum(r == role and words in path for r, _, path, _ in self.requests)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.shutdown()
            server.server_close()


if __name__ == "__main__":  # starts a hub for manual tests: local_hub.py ORG/NAME FOLDER...
    import os
    import sys
    import time
    hub = Hub()
    for repo, folder in zip(sys.argv[1::2], sys.argv[2::2]):
        files = {}
        for base, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(base, name), "rb") as file:
                    files[os.path.relpath(os.path.join(base, name), folder)] = file.read()
        hub.repositories[repo] = Repository(files)
    print(f"export HF_ENDPOINT={hub.endpoint}", flush=True)
    while True:
        time.sleep(3600)
