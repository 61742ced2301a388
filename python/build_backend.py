"""The build backend: scikit-build-core's, and an sdist that has the library's sources in it.

A checkout has them beside python/, where scikit-build-core's sdist does not look. The sdist is laid out as the tree is; pyproject.toml at the
root of both names this file, and python/pyproject.toml has everything else.
"""
import os
import pathlib
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
os.chdir(HERE)  # scikit-build-core reads the pyproject.toml of the folder it is called in; folders are given to it in full

from scikit_build_core.build import *  # noqa: E402, F403
from scikit_build_core.build import prepare_metadata_for_build_wheel  # noqa: E402

INSIDE = ["CMakeLists.txt", "LICENSE", "pyproject.toml", "cmake", "include", "src", "python"]
OUTSIDE = {"__pycache__", ".pytest_cache", "tests"}


def _taken(entry):
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if pathlib.PurePath(entry.name).name in OUTSIDE else entry


def build_sdist(sdist_directory, config_settings=None):
    with tempfile.TemporaryDirectory() as folder:
        about = pathlib.Path(folder) / prepare_metadata_for_build_wheel(folder, config_settings) / "METADATA"
        name = about.parent.name.removesuffix(".dist-info")
        with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as sdist:
            sdist.add(about, f"{name}/PKG-INFO", filter=_taken)
            for part in INSIDE:
                sdist.add(HERE.parent / part, f"{name}/{part}", filter=_taken)
    return f"{name}.tar.gz"
