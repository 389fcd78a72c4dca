"""The versions of installed libraries, without importing them."""

from __future__ import annotations

from importlib import metadata


def library_version(module: str) -> str:
    """Return the version of the distribution that has a module: `tensorflow` is in several, such as tensorflow-cpu.

    Raises:
        importlib.metadata.PackageNotFoundError: No distribution has it.
    """
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        found = metadata.packages_distributions().get(module, [module])  # reads all distributions: 0.2 s
        return metadata.version(found[0])
