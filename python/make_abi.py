"""Writes flatkv/_abi.py from the public headers: constants, structs and calls as ctypes needs them.

usage: make_abi.py <_abi.py> <header>...

A field or call that is added to a header is there after the next build; nothing of the headers is written twice. A declaration
that is not understood ends the build.
"""
import re
import sys

SCALARS = {"uint8_t": "C.c_uint8", "uint32_t": "C.c_uint32", "uint64_t": "C.c_uint64", "int64_t": "C.c_int64", "size_t": "C.c_size_t",
           "float": "C.c_float", "double": "C.c_double", "bool": "C.c_bool", "char": "C.c_char", "int": "C.c_int",
           "unsigned": "C.c_uint", "void": "None"}
HANDLES = ("mlx_array", "mlx_vector_array", "mlx_stream")  # of mlx-c: one pointer each


class Headers:
    def __init__(self):
        self.constants = {}
        self.enums = set()
        self.structs = {}
        self.calls = {}

    def read(self, path):
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.DOTALL)
        text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        for name, body in re.findall(r"enum\s*(\w*)\s*\{([^}]*)\}", text):
            self.enums.add(name)
            self.read_enum(body)
        for name in re.findall(r"typedef\s+\w[\w\s]*\(\*(\w+)\)\(", text):
            SCALARS[name] = "C.c_void_p"
        for name, target in re.findall(r"typedef\s+(\w+)\s+(\w+)\s*;", text):
            SCALARS[target] = SCALARS[name]
        for name, body in re.findall(r"typedef\s+struct\s+(\w+)\s*\{([^}]*)\}\s*\1\s*;", text):
            self.structs[name] = [field for line in body.split(";") if line.strip() for field in self.fields(line)]
        for result, name, arguments in re.findall(r"FKV_API\s+([\w\s*]+?)(\w+)\(([^)]*)\)\s*;", text):
            parts = [] if arguments.strip() in ("", "void") else arguments.split(",")
            self.calls[name] = (self.type_of(result), [self.argument(part) for part in parts])

    def read_enum(self, body):
        value = -1
        for item in filter(None, (part.strip() for part in body.split(","))):
            name, _, given = item.partition("=")
            given = given.strip().replace("UINT32_MAX", "0xFFFFFFFF")
            value = int(given, 0) if given else value + 1
            self.constants[name.strip()] = value

    def type_of(self, text):
        words = text.replace("const", " ").replace("enum ", " ")
        base, stars = words.replace("*", " ").strip(), words.count("*")
        if stars:
            return "C.c_char_p" if base == "char" and stars == 1 else "C.c_void_p"
        if base in SCALARS:
            return SCALARS[base]
        if base in self.enums:
            return "C.c_int"
        if base in self.structs or base in HANDLES:
            return base
        raise SystemExit(f"make_abi.py: what is the type {text!r}?")

    def fields(self, line):
        pointer = re.search(r"\(\*(\w+)\)\(", line)
        if pointer:
            yield pointer[1], "C.c_void_p"
            return
        head, *more = line.strip().split(",")
        match = re.match(r"(.*?[\s*])(\w+)\s*((?:\[\w+\])*)$", head.strip(), re.DOTALL)
        for name, sizes in [(match[2], match[3])] + [re.match(r"\s*(\w+)\s*((?:\[\w+\])*)$", m).groups() for m in more]:
            kind = self.type_of(match[1])
            for size in reversed(re.findall(r"\[(\w+)\]", sizes)):
                kind += f" * {self.constants.get(size) or int(size)}"
            yield name, "C.c_void_p" if kind == "C.c_char_p" and "const" not in match[1] else kind

    def argument(self, text):
        match = re.match(r"(.*?[\s*])(\w+)\s*(\[\w*\])?$", text.strip(), re.DOTALL)
        kind = self.type_of(match[1] + ("*" if match[3] else ""))
        return "C.c_void_p" if kind == "C.c_char_p" and "const" not in match[1] else kind

    def write(self, file):
        file.write('"""Written by make_abi.py from the headers: not to be edited."""\nimport ctypes as C\n')
        for name, value in self.constants.items():
            file.write(f"{name} = {value}\n")
        for name in HANDLES:
            file.write(f'class {name}(C.Structure):\n    _fields_ = [("ctx", C.c_void_p)]\n')
        for name, fields in self.structs.items():
            listed = "".join(f'        ("{field}", {kind}),\n' for field, kind in fields)
            file.write(f"class {name}(C.Structure):\n    _fields_ = [\n{listed}    ]\n")
        file.write("CALLS = {\n")
        for name, (result, arguments) in self.calls.items():
            file.write(f'    "{name}": ({result}, [{", ".join(arguments)}]),\n')
        file.write("}\n")


def main():
    headers = Headers()
    for path in sys.argv[2:]:
        headers.read(path)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        headers.write(file)


if __name__ == "__main__":
    main()
