"""Describes the machine and names its folder under bench/results. Imported by the benchmark scripts."""

import os
import pathlib
import platform
import re
import subprocess


def name(machine):
    """Returns a folder name derived from the processor, such as xeon-sapphire-rapids-2c."""
    # Virtual machines hide the model name of the processor. CPU family and model number still identify its generation.
    # Skylake and Cascade Lake have the same number, but only Cascade Lake has VNNI.
    skylake = "cascade-lake" if "avx512_vnni" in machine["instructions"] else "skylake"
    generations = {("6", "85"): skylake, ("6", "106"): "ice-lake", ("6", "143"): "sapphire-rapids", ("6", "173"): "granite-rapids"}
    words = re.sub(r"\(R\)|\(TM\)|Processor|CPU|@.*", " ", machine["processor"])
    words = " ".join(w for w in words.split() if w not in ("Intel", "AMD"))
    generation = generations.get((machine.get("family"), machine.get("model_number")), "")
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {generation} {machine['cores']}c".lower()).strip("-")


def about():
    found = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "system": platform.system()}
    if hasattr(os, "sched_getaffinity"):
        found["cores"] = len(os.sched_getaffinity(0))
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}).stdout
    said = dict(re.findall(r"^\s*(Model name|CPU family|Model|Flags):\s*(.+)$", lines, re.M))
    found["processor"] = said.get("Model name", found["processor"])
    found["family"], found["model_number"] = said.get("CPU family"), said.get("Model")
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_fp16", "amx_int8", "asimddp", "sve", "i8mm")
    found["instructions"] = [flag for flag in wanted if flag in said.get("Flags", "").split()]
    found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def revision():
    """Returns the revision of this tree, with a plus sign if the sources of the libraries and programs have uncommitted changes."""
    def git(*arguments):
        command = ["git", "-C", str(pathlib.Path(__file__).resolve().parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "src", "include") else "")
