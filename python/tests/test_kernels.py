"""The fused way without a GPU: which kernels a step makes, with which arguments, and in which order they follow each other."""
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


@pytest.mark.parametrize("codec", ["8/4", "s4/s4"])
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_step_makes_its_kernels(device, codec):
    if device == "metal":
        try:
            mx.fast.metal_kernel(name="any", input_names=["a"], output_names=["b"], source="")
        except RuntimeError as error:  # MLX before 0.32
            pytest.skip(f"kernels for Metal are made on Metal alone: {error}")
    run(device, codec)


def test_generation_is_ordered_by_tickets_alone():
    run("generate")


def test_kept_graphs_answer_as_those_built_anew():
    run("replay")
