"""Checks, without a GPU, which kernels a fused step creates, with which arguments and in which order."""
import pathlib
import subprocess
import sys

import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")


def run(*arguments):
    script = pathlib.Path(__file__).parent / "kernel_calls.py"
    found = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_step_creates_the_expected_kernels(device):
    if device == "metal":
        try:
            mx.fast.metal_kernel(name="any", input_names=["a"], output_names=["b"], source="")
        except RuntimeError as error:  # MLX before 0.32
            pytest.skip(f"this version of MLX creates Metal kernels only on Metal: {error}")
    run(device, "8/4", "s4/s4")


def test_dependency_arrays_order_all_kernels_of_a_generation():
    run("generate")


def test_compiled_graphs_match_uncompiled_steps():
    run("replay")
