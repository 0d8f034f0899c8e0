"""Packages from the index that a bench may use, and libraries that cannot take part."""

from __future__ import annotations

import importlib.metadata


class UnavailableError(Exception):
    """A library cannot take part; the message says why, and what to install."""


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(*packages: str) -> None:
    """Look for distributions.

    Raises:
        UnavailableError: some are not installed.
    """
    absent = [package for package in packages if installed_version(package) is None]
    if absent:
        raise UnavailableError(f"not installed: pip install {' '.join(absent)}")
