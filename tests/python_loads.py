#!/usr/bin/env python3
"""Loads the shared library with ctypes, then plans, opens and closes a cache.

usage: python_loads.py <libflatkv> <include/flatkv/flatkv.h>

The structs are parsed from the header, so that this script need not change when a field changes.
"""
import ctypes
import re
import sys

C_TYPES = {"uint8_t": ctypes.c_uint8, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float,
           "bool": ctypes.c_bool, "char": ctypes.c_char}
FIELD = re.compile(r"^\s*(?:const\s+)?(\w+)\s+(\*?)([^;(]+);", re.MULTILINE)


class Header:
    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
        self.constants = {name: int(value) for name, value in re.findall(r"(FKV_MAX_\w+) = (\d+)", text)}
        self.bodies = dict(re.findall(r"typedef struct (\w+) \{([^}]*)\} \1;", text))
        self.known = dict(C_TYPES)

    def type_of(self, name):
        if name not in self.known:
            if name in self.bodies:
                self.known[name] = type(name, (ctypes.Structure,), {"_fields_": list(self.fields(self.bodies[name]))})
            else:
                self.known[name] = ctypes.c_void_p if name.endswith("_fn") else ctypes.c_int  # all other types are enums
        return self.known[name]

    def fields(self, body):
        for kind, star, names in FIELD.findall(body):
            for name in names.split(","):
                name, _, count = name.strip().partition("[")
                base = ctypes.c_void_p if star else ctypes.c_void_p if kind == "void" else self.type_of(kind)
                if count:
                    count = count.rstrip("]")
                    base *= self.constants[count] if count in self.constants else int(count)
                yield name.lstrip("*"), base


def main():
    library = ctypes.CDLL(sys.argv[1])
    header = Header(sys.argv[2])
    config_type, plan_type, stats_type = (header.type_of(name) for name in ("fkv_config", "fkv_plan", "fkv_stats"))
    library.fkv_version.restype = ctypes.c_char_p
    library.fkv_message.restype = ctypes.c_char_p
    library.fkv_config_default.restype = config_type
    library.fkv_cache_close.argtypes = [ctypes.c_void_p]
    library.fkv_cache_close.restype = None

    def call(function, *arguments):
        status = function(*arguments)
        assert status == 0, (status, library.fkv_message())

    config = library.fkv_config_default()
    assert config.page_tokens == 64 and config.layer.k.bits == 4 and config.rotate == 2, "the header was parsed incorrectly"
    config.n_layers = 2
    config.layer.n_q_heads, config.layer.n_kv_heads, config.layer.head_dim = 4, 2, 64
    config.max_tokens = 1024
    config.n_threads = 2
    plan, cache, stats = plan_type(), ctypes.c_void_p(), stats_type()
    call(library.fkv_plan_make, ctypes.byref(config), ctypes.byref(plan))
    call(library.fkv_cache_open, ctypes.byref(config), ctypes.byref(cache))
    call(library.fkv_cache_stats, cache, ctypes.byref(stats))
    assert stats.planned_bytes == plan.total_bytes > plan.slab_bytes > 0
    library.fkv_cache_close(cache)
    print(f"flatkv {library.fkv_version().decode()} in Python {sys.version.split()[0]}: a cache of {plan.total_bytes} bytes")


if __name__ == "__main__":
    main()
