"""The C library inside flatkv._native, by ctypes, and its errors as exceptions.

`host` releases the GIL around a call and `held` keeps it: caches on MLX are driven with `held`, because their calls use Python.
"""
from __future__ import annotations

import ctypes as C
from typing import Any, Callable

from . import _abi, _native

has_models = hasattr(_abi, "fkv_model_info")


class Error(RuntimeError):
    """What the library refused, in its words. `status` is the name of its status, "FKV_POOL_FULL"."""

    def __init__(self, status: str, message: str):
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class DoesNotFit(Error, MemoryError):
    """Ordinary results: more tokens, sequences, rows or bytes than were planned."""


class BadFile(Error, ValueError):
    """A page file or model file that is not right, or of another model."""


class BadCall(Error, ValueError):
    """A wrong argument, configuration, sequence or moment."""


_CLASSES = {**dict.fromkeys(range(-19, 0), BadCall), **dict.fromkeys(range(-39, -19), DoesNotFit), **dict.fromkeys(range(-59, -40), BadFile)}


class _Calls:
    """The calls of one way of loading, as attributes; made at first use."""

    def __init__(self, loader: Callable[[str], Any]):
        self._library = loader(_native.__file__)

    def __getattr__(self, name: str) -> Any:
        result, arguments = _abi.CALLS[name]
        call = getattr(self._library, name)
        call.restype, call.argtypes = result, arguments
        setattr(self, name, call)
        return call


host = _Calls(C.CDLL)
held = _Calls(C.PyDLL)


def check(status: int) -> None:
    if status != _abi.FKV_OK:
        name, message = held.fkv_status_name(status), held.fkv_message()
        raise _CLASSES.get(status, Error)(name.decode(), message.decode(errors="replace"))


def version() -> str:
    return held.fkv_version().decode()
