"""The cache folder, and files in it that are made once: models, and kernels compiled for a GPU or the emulator.

A file is trusted only after a look: its name is a SHA-256 over its content, so that one that was cut short, changed or
exchanged is noticed and made again. Reading costs 0.05 ms for a kernel and some 0.3 s for the largest generated model,
whose weights have to be read anyway. Nothing here depends on the cache: where it can't be read or written, files are
made in a temporary folder that lasts as long as the process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rvllm.errors import RvllmError

Used = TypeVar("Used")

_warned = threading.Event()


class CacheError(RvllmError):
    """No folder can be used: no permission, no space, no such place."""


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


def cached(
    kind: str, key: object, suffix: str, build: Callable[[Path, Path], None], use: Callable[[Path], Used]
) -> Used:
    """`use(path)` for the file made earlier for an equal `key`, or for a new one made by `build(output, work_folder)`.

    It lies in the folder `kind` of the cache. A new file gets its final name in one step, when it is complete, so
    processes that build the same do not disturb each other. `use` takes at once what it needs of the file (reads, maps
    or copies it), for the cache may be emptied at any moment. An OSError from `build` or `use` is a fault of the cache.

    Raises CacheError if a temporary folder can't be used either.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]

    def attempt(root: Path) -> Used:
        folder = root / kind / name
        return use(_find(folder, suffix) or _make(folder, suffix, build))

    try:
        with suppress(FileNotFoundError):  # another process may have emptied the cache: once more, then
            return attempt(cache_dir())
        return attempt(cache_dir())
    except (OSError, CacheError) as error:
        _warn_once(f"it can't be used ({error}), files are made for this run alone; set RVLLM_CACHE to a folder")
    try:
        return attempt(Path(_temporary().name))
    except OSError as error:
        raise CacheError(f"neither the cache nor a temporary folder can be used ({error}); set RVLLM_CACHE") from error


def _find(folder: Path, suffix: str) -> Path | None:
    for path in folder.glob(f"*{suffix}"):
        if _digest(path, folder.name) == path.stem:
            return path
        _warn_once(f"{path} is damaged, it is made anew")
        with suppress(OSError):  # whoever may not remove it sees through it every time
            path.unlink()
    return None


def _make(folder: Path, suffix: str, build: Callable[[Path, Path], None]) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as work:
        output = Path(work, "output" + suffix)
        build(output, Path(work))
        folder.mkdir(exist_ok=True)
        return output.replace(folder / (_digest(output, folder.name) + suffix))


def _digest(path: Path, name: str) -> str:
    """Over what the file is kept for, too: the whole file of another key is as wrong as half of its own."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha256(name.encode())).hexdigest()


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="rvllm-", ignore_cleanup_errors=True)


def _warn_once(text: str) -> None:
    """One warning is enough for a process: the cause is nearly always the same one."""
    if not _warned.is_set():
        _warned.set()
        warnings.warn(f"rvllm's cache: {text}", stacklevel=3)
