"""The cache folder, and files in it that are made once: models, and kernels compiled for a GPU or the emulator."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rvllm.errors import RvllmError


class CacheError(RvllmError):
    """The cache folder cannot be used: no permission, no space, no such place."""


def cache_dir() -> Path:
    """`RVLLM_CACHE`, else `XDG_CACHE_HOME/rvllm`, else `~/.cache/rvllm`. It need not exist yet."""
    if own := os.environ.get("RVLLM_CACHE"):
        return Path(os.path.expanduser(own)).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG rules: a relative value is to be ignored
        return Path(xdg) / "rvllm"
    try:
        return Path.home() / ".cache" / "rvllm"
    except RuntimeError as error:
        raise CacheError("no home folder to keep files in: set RVLLM_CACHE to a folder") from error


def cached(kind: str, key: object, suffix: str, build: Callable[[Path, Path], None]) -> Path:
    """The file made earlier for an equal `key`, or a new one made by `build(output, work_folder)`.

    It lies in the folder `kind` of the cache. A new file gets its final name in one step, when it is complete. So
    processes that build the same at the same time do not disturb each other: the last one wins, with equal content.
    """
    folder = cache_dir() / kind
    path = folder / (hashlib.sha256(repr(key).encode()).hexdigest()[:32] + suffix)
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=folder, prefix="build-")
    except OSError as error:
        raise CacheError(f"cannot write the cache folder {folder} ({error}); set RVLLM_CACHE to one") from error
    with work as name:
        output = Path(name) / ("output" + suffix)
        build(output, Path(name))
        output.replace(path)
    return path
