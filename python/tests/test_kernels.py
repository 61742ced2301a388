"""The fused way without a GPU: which kernels a step makes, with which arguments, and in which order they follow each other."""
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")


def run(*arguments):
    script = pathlib.Path(__file__).parent / "kernel_calls.py"
    found = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("codec", ["8/4", "s4/s4"])
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_a_step_makes_its_kernels(device, codec):
    run(device, codec)


def test_generation_is_ordered_by_tickets_alone():
    run("generate")


def test_kept_graphs_answer_as_those_built_anew():
    run("replay")
