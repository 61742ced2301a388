"""The C library inside flatkv._native, by ctypes, and its errors as exceptions.

`host` releases the GIL around a call and `held` keeps it: caches on MLX are driven with `held`, because their calls use Python.
"""
from __future__ import annotations

import ctypes as C
import operator
import weakref
from typing import TYPE_CHECKING, Any, Callable

from . import _abi, _native

if TYPE_CHECKING:
    from typing_extensions import Self

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


def count(name: str, value: Any, bits: int = 32) -> int:
    """A number of the caller's for a field of this many bits, which would be cut to fit."""
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: a whole number is expected") from None
    if not 0 <= n < 1 << bits:
        raise BadCall("FKV_BAD_ARGUMENT", f"{name} is {n}: a number from 0 to {(1 << bits) - 1} is expected")
    return n


def choice(name: str, value: Any, of: dict[Any, Any]) -> Any:
    """What this word of the caller's stands for."""
    if not isinstance(value, (str, type(None))) or value not in of:
        raise BadCall("FKV_BAD_ARGUMENT", f"{name} is {value!r}: choose one of {', '.join(map(repr, of))}")
    return of[value]


class Owner:
    """Holds something of the library's until close(), the end of `with`, or until nobody holds it. To use it after that is an error."""

    def _own(self, handle: int, close: Callable[[int], Any]) -> None:
        self._pointer = C.c_void_p(handle)
        self._close = weakref.finalize(self, close, handle)

    @property
    def _handle(self) -> C.c_void_p:
        if not self._close.alive:
            raise BadCall("FKV_BAD_STATE", f"this {type(self).__name__} is closed: open another")
        return self._pointer

    def close(self) -> None:
        """Gives everything back."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
