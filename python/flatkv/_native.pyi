"""The extension module is typed as Any."""
from typing import Any

def __getattr__(name: str) -> Any: ...
