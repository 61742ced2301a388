"""Tests generation by several threads over one pool."""
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_concurrent_threads_match_serial_generation(kernels):
    script = pathlib.Path(__file__).parent / "thread_turns.py"
    found = subprocess.run([sys.executable, script, kernels], capture_output=True, text=True, check=False, timeout=400)
    assert found.returncode == 0, found.stderr[-3000:]
