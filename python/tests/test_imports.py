"""Checks that the modules of the package import only modules of lower layers."""
import ast
import pathlib

import flatkv

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "flatkv"
#: modules from the lowest to the highest layer: library, cache, MLX, mlx-lm, commands
ORDER = ["_abi", "_native", "_library", "_config", "svg", "plan", "cache", "model", "mlx_cache", "lm.history", "lm.products", "lm.layout", "lm.pool", "lm.sizing", "lm.prompt",
         "lm.recurrent", "lm.probe", "lm.replay", "lm.passes", "lm.admission", "lm.server", "lm.hook", "lm.export", "lm", "planning", "", "malloc", "programs", "bench", "doctor", "__main__"]


def name_of(path):
    """Returns the module name without the package: "" for flatkv itself, "lm" for flatkv.lm."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imports(name, path):
    """Yields the modules of the package that a module imports, also inside functions."""
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "flatkv")
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = folder.split(".") if folder else []
            base = base[:len(base) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                yield whole if whole in ORDER else ".".join(base)


def test_modules_import_lower_layers_only():
    assert set(MODULES) <= set(ORDER), "add new modules to ORDER"
    wrong = [f"{name or 'flatkv'} imports {other or 'flatkv'}" for name, path in MODULES.items() for other in imports(name, path)
             if ORDER.index(other) >= ORDER.index(name)]
    assert not wrong


def test_the_order_lists_existing_modules():
    assert flatkv.plan and set(ORDER) - set(MODULES) <= {"_abi", "_native"}
