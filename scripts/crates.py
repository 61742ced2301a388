"""Helpers shared by the download scripts: files pinned by SHA-256, crates downloaded with cargo, and a lock against concurrent runs."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile


class Failure(Exception):
    """An error with a message for the user: the cause, and how to fix it."""


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_right(path, digest):
    return path.is_file() and sha256_of(path) == digest


def run(command, what, log=None, environment=None):
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open(log, "ab")) if log else None
        result = subprocess.run(command, check=False, stdout=out, stderr=out, env=environment)
    if result.returncode != 0:
        raise Failure(f"{what} failed; its output is {'in ' + str(log) if log else 'above'}")


@contextlib.contextmanager
def locked(folder):
    """Locks the folder, so that a second run waits for the first one and reuses its files."""
    (folder / "downloads").mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def get_crate(name, version, digest, folder):
    """Returns the path of the crate's source archive in `folder`, downloading it if necessary.

    cargo fetch downloads the dependencies of a package into cargo's cache, so an empty package that depends on the crate is used."""
    crate = folder / f"{name}-{version}.crate"
    if is_right(crate, digest):
        return crate
    if not shutil.which("cargo"):
        raise Failure(f"cargo is needed to download {name} {version}; scripts/setup installs it")
    cargo_home = pathlib.Path(os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo"))
    # Before version 1.68, cargo supports the sparse registry index only as an unstable feature and otherwise clones the whole index.
    environment = dict(os.environ, RUSTC_BOOTSTRAP="1", CARGO_UNSTABLE_SPARSE_REGISTRY="true")
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder)
        (package / "lib.rs").touch()
        (package / "Cargo.toml").write_text(
            '[package]\nname = "fetch"\nversion = "0.0.0"\nedition = "2021"\n[lib]\npath = "lib.rs"\n'
            f'[dependencies]\n{name} = "={version}"\n', encoding="ascii")
        command = ["cargo", "fetch", "--quiet", "--manifest-path", str(package / "Cargo.toml")]
        run(command, f"cargo fetch of {name} {version}", environment=environment)
    for found in cargo_home.glob(f"registry/cache/*/{crate.name}"):
        if is_right(found, digest):
            shutil.copyfile(found, crate)
            return crate
    raise Failure(f"cargo downloaded no {crate.name} with the pinned SHA-256 {digest}; the file was not used")
