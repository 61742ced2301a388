"""Build backend: scikit-build-core, with an sdist that also contains the C sources.

The C sources are outside python/, where scikit-build-core does not find them. The sdist has the layout of the checkout. The
pyproject.toml at its root refers to this file, and python/pyproject.toml contains the metadata.
"""
import os
import pathlib
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
os.chdir(HERE)  # scikit-build-core reads pyproject.toml from the working directory; output paths are absolute

from scikit_build_core.build import *  # noqa: E402, F403
from scikit_build_core.build import prepare_metadata_for_build_wheel  # noqa: E402

INCLUDED = ["CMakeLists.txt", "LICENSE", "pyproject.toml", "cmake", "include", "src", "python"]
EXCLUDED_NAMES = {"__pycache__", ".pytest_cache", "tests"}


def _filter_entry(entry):
    """Drops excluded files and removes the owner of an archive entry."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if pathlib.PurePath(entry.name).name in EXCLUDED_NAMES else entry


def build_sdist(sdist_directory, config_settings=None):
    """Writes the sdist and returns its file name."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = pathlib.Path(folder) / prepare_metadata_for_build_wheel(folder, config_settings) / "METADATA"
        name = metadata.parent.name.removesuffix(".dist-info")
        with tarfile.open(pathlib.Path(sdist_directory) / f"{name}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as sdist:
            sdist.add(metadata, f"{name}/PKG-INFO", filter=_filter_entry)
            for part in INCLUDED:
                sdist.add(HERE.parent / part, f"{name}/{part}", filter=_filter_entry)
    return f"{name}.tar.gz"
