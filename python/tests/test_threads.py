"""Several threads that generate over one pool."""
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_threads_take_turns(way):
    script = pathlib.Path(__file__).parent / "thread_turns.py"
    found = subprocess.run([sys.executable, script, way], capture_output=True, text=True, check=False, timeout=400)
    assert found.returncode == 0, found.stderr[-3000:]
