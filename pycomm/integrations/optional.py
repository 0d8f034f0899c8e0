"""Import of the libraries that the integrations are for, none of which pycomm depends on."""

from __future__ import annotations

import importlib
from typing import Any


def library(*names: str, whose: str) -> Any:
    """Return the first of the modules ``names`` that is installed.

    Args:
        whose: module that wants it, for the message.

    Raises:
        ImportError: none is installed.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
    packages = " or ".join(dict.fromkeys(name.split(".")[0] for name in names))
    raise ImportError(f"{whose} wants {packages}: pip install 'pycomm-torch[frameworks]'")
