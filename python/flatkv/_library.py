"""Calls the C library inside flatkv._native through ctypes and converts its status codes to exceptions.

`host` releases the GIL during a call. `held` keeps the GIL, which calls on MLX caches require because they run Python code.
"""
from __future__ import annotations

import ctypes as C
import errno
import operator
import os
import re
import weakref
from typing import TYPE_CHECKING, Any, Callable

from . import _abi, _native

if TYPE_CHECKING:
    from typing_extensions import Self

has_models = hasattr(_abi, "fkv_model_info")


class Error(RuntimeError):
    """Base class of flatkv's exceptions. `status` is the name of the library's status code, such as "FKV_POOL_FULL"."""

    def __init__(self, status: str, message: str):
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message)


class DoesNotFit(Error, MemoryError):
    """Raised if tokens, sequences, rows or bytes exceed the reserved amount."""


class BadFile(Error, ValueError):
    """Raised if a page file or model file is corrupt or belongs to another model."""


class FileError(Error, OSError):
    """Raised if a file cannot be read or written. `errno` is set if the file does not exist."""


class MissingFile(FileError, FileNotFoundError):
    """Raised if a file or folder does not exist."""

    def __init__(self, status: str, message: str):
        super().__init__(status, message)
        self.errno = errno.ENOENT


class BadCall(Error, ValueError):
    """Raised for an invalid argument, configuration or sequence, or a call in the wrong state."""


_CLASSES = {**dict.fromkeys(range(-19, 0), BadCall), **dict.fromkeys(range(-39, -19), DoesNotFit), **dict.fromkeys(range(-59, -40), BadFile), _abi.FKV_IO: FileError}

#: Python names of C functions that occur in messages of the library
_PYTHON_NAMES = {"fkv_seq_reserve": "Sequence.reserve", "fkv_seq_fork": "Sequence.fork", "fkv_seq_truncate": "Sequence.truncate",
                 "fkv_seq_close": "Sequence.close", "fkv_seq_open": "Cache.open", "fkv_step_begin": "Cache.step", "fkv_step_commit": "Step.commit",
                 "fkv_step_abort": "Step.abort", "fkv_write": "Step.write", "fkv_attend": "Step.attend", "fkv_mlx_write": "MlxStep.write",
                 "fkv_mlx_attend": "MlxStep.attend"}


def _python_message(message: str) -> str:
    """Replaces C function names in a message of the library."""
    return re.sub(r"\bfkv_\w+(?=\(\)|:)", lambda match: _PYTHON_NAMES.get(match[0], match[0].removeprefix("fkv_")), message)


class _Calls:
    """Exposes the functions of one ctypes loader as attributes, which are created on first use."""

    def __init__(self, loader: Callable[[str], Any]):
        self._library = loader(_native.__file__)

    def __getattr__(self, name: str) -> Any:
        if name not in _abi.CALLS:
            raise AttributeError(f"the library has no function {name}")
        result, arguments = _abi.CALLS[name]
        call = getattr(self._library, name)
        call.restype, call.argtypes = result, arguments
        setattr(self, name, call)
        return call


host = _Calls(C.CDLL)
held = _Calls(C.PyDLL)


def check(status: int, path: str | os.PathLike[str] | None = None) -> None:
    """Raises the exception of a status other than FKV_OK. path: the file that was opened for reading, if any."""
    if status != _abi.FKV_OK:
        name, message = held.fkv_status_name(status), held.fkv_message()
        kind = _CLASSES.get(status, Error)
        if kind is FileError and path is not None and not os.path.exists(path):
            kind = MissingFile
        raise kind(name.decode(), _python_message(message.decode(errors="replace")))


def version() -> str:
    """Returns the library's version, such as "0.1.0"."""
    return str(held.fkv_version().decode())


def count(name: str, value: Any, bits: int = 32) -> int:
    """Returns value as an integer after checking that it fits an unsigned field of `bits` bits."""
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer (got {value!r})") from None
    if not 0 <= n < 1 << bits:
        raise BadCall("FKV_BAD_ARGUMENT", f"{name} must be from 0 to {(1 << bits) - 1} (got {n})")
    return n


def choice(name: str, value: Any, choices: dict[Any, Any]) -> Any:
    """Returns the entry of choices for value; raises BadCall with the list of valid values if there is none."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        raise BadCall("FKV_BAD_ARGUMENT", f"{name} must be one of {', '.join(map(repr, choices))} (got {value!r})")
    return choices[value]


class Owner:
    """Owns a library handle until close(), the end of `with`, or garbage collection. Any later use raises BadCall."""

    def _own(self, handle: int, close: Callable[[int], Any]) -> None:
        self._pointer = C.c_void_p(handle)
        self._close = weakref.finalize(self, close, handle)

    @property
    def _handle(self) -> C.c_void_p:
        if not self._close.alive:
            raise BadCall("FKV_BAD_STATE", f"this {type(self).__name__} is closed; create a new one")
        return self._pointer

    def close(self) -> None:
        """Releases all memory."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
