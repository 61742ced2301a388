"""The module that make_abi.py generates is typed as Any."""
from typing import Any

def __getattr__(name: str) -> Any: ...
