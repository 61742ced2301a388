"""Runs the first example of python/README.md on 4-bit models that mlx_lm.convert created.

usage: readme_lines.py FOLDER [--gguf smollm2.gguf] [--json FILE]

Creates a virtual environment in FOLDER, installs python/ and mlx-lm there, converts the needle model of this repository (and a Llama GGUF
file), and runs the example on each model with only the model's name changed. The same process then asks for a fact from the prompt.
test_readme.py does the same for the needle model in the current environment.
"""
import argparse
import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEEDLE = ROOT / "models" / "needle"
PAGES = {"python/README.md": ROOT / "python" / "README.md", "docs/python.md": ROOT / "docs" / "python.md"}
FACT = " The vault number of Vorselzu is 3352009. "
QUESTION = "\nQuestion: What is the vault number of Vorselzu?\nAnswer: The vault number of Vorselzu is "
EPILOGUE = """
import json, sys
pool, = flatkv.lm.pools()
answer = mlx_lm.generate(model, tokenizer, prompt=sys.argv[1], max_tokens=12)
print("\\n" + json.dumps({"answer": answer, "codec": pool.options.codec, "max_tokens": pool.options.max_tokens, "plan_bytes": pool.plan.total_bytes,
                         "tokens": pool.stats.tokens, "flatkv": flatkv.__file__}))
"""


def lines(page):
    """Returns the code block of a page that starts with the import of flatkv and mlx_lm."""
    return re.search(r"```python\n(import flatkv, mlx_lm\n.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]


def run_lines(code, folder, prompt, python=sys.executable):
    """Runs the example with the model in folder. Returns its output and the result of EPILOGUE."""
    code, n = re.subn(r'mlx_lm\.load\("[^"]+"\)', f"mlx_lm.load({str(folder)!r})", code)
    assert n == 1, "the example must load exactly one model"
    with tempfile.TemporaryDirectory() as elsewhere:  # runs outside the checkout, because the package there lacks the extension module
        done = subprocess.run([python, "-c", code + EPILOGUE, prompt], check=True, capture_output=True, text=True, cwd=elsewhere)
    printed, _, found = done.stdout.rstrip().rpartition("\n")
    return {"printed": printed.strip(), **json.loads(found)}


def byte_tokenizer():
    """Returns the needle model's tokenizer, in which every byte is the token with its value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these bytes are mapped to themselves, and all others to code points from 256 on
    others = [b for b in range(256) if b not in printable]
    letters = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def needle(folder):
    """Writes the needle model in Hugging Face format. Generation ends at a full stop or a newline."""
    folder.mkdir(parents=True)
    config = json.loads((NEEDLE / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [ord("."), ord("\n")]}), encoding="utf-8")
    shutil.copy(NEEDLE / "needle.safetensors", folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)
    return folder


def bpe_tokenizer(fields):
    """Returns SmolLM2's tokenizer from a GGUF file. Digits are separate tokens, and control tokens are never split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == 3])
    end = tokens[fields["tokenizer.ggml.eos_token_id"].contents()]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, chat_template=fields["tokenizer.chat_template"].contents())


def from_gguf(path, folder):
    """Converts a Llama GGUF file to Hugging Face format with dequantized weights."""
    sys.path.insert(0, str(ROOT / "bench" / "peers"))
    import dataclasses

    import gguf
    import mlx.core as mx
    import mlx_lm_peer
    from mlx.utils import tree_flatten
    folder.mkdir(parents=True)
    model, tokenizer = mlx_lm_peer.load(path), bpe_tokenizer(gguf.GGUFReader(path).fields)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    tokenizer.save_pretrained(folder)
    config = {k: v for k, v in dataclasses.asdict(model.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tokenizer.eos_token_id}), encoding="utf-8")
    return folder


def quantized(folder):
    """Quantizes a model to 4 bits. Scales are float32, because MLX's CPU backend is 60 times slower with float16 scales."""
    import mlx_lm
    made = folder.parent / f"{folder.name}-4bit"
    mlx_lm.convert(str(folder), str(made), quantize=True, q_bits=4, dtype="float32")
    return made


def new_environment(folder, packages):
    """Creates an environment, installs the package as the README describes, and returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    mlx = ["mlx[cpu]"] if sys.platform == "linux" else []
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{ROOT}/python/", "mlx-lm", *mlx, *packages],
                   check=True)
    return folder / "bin" / "python"


def inside(folder, gguf, out):
    """Runs in the new environment: creates the models and runs the example on each."""
    book = (NEEDLE / "book.txt").read_text(encoding="utf-8")
    found, asked = [], [(needle(folder / "needle"), book[:200] + FACT + book[200:400] + QUESTION)]
    if gguf:
        asked.append((from_gguf(gguf, folder / gguf.stem), "The capital of France is"))
    for plain, prompt in asked:
        for at in (plain, quantized(plain)):
            found.append({"folder": at.name, "files": sorted(f.name for f in at.iterdir())} | run_lines(lines(PAGES["python/README.md"]), at, prompt))
            del found[-1]["flatkv"]
            print(f"{at.name}: {found[-1]['answer']!r}", flush=True)
    versions = {name.replace("-", "_"): importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    if out:
        out.write_text(json.dumps({"lines": lines(PAGES["python/README.md"]).splitlines(), **versions, "runs": found}, indent=1) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.folder, options.gguf, options.json)
    python = new_environment(options.folder / "venv", ["gguf"] if options.gguf else [])
    return subprocess.run([python, __file__, *sys.argv[1:], "--inside"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
