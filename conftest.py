"""Shared by tests and notebooks. Fetches the default model once, before anything is collected that needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# Child processes find the package, and notebooks their small sizes, through the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("RVLLM_NOTEBOOK_SCALE", "small")
# Before NumPy is loaded, here and in child processes: beside other programs, threads that wait for each other crawl.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """No test downloads anything: where one needs the model, it is there before the first one starts."""
    if any(map(_needs_model, session.items)) and not session.config.option.collectonly:
        from rvllm import hub
        from rvllm.errors import RvllmError

        try:
            hub.resolve("smollm2-135m")
        except RvllmError as error:
            pytest.exit(f"the tests need the default model: {error}", returncode=3)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Notebooks run as on a reader's machine: from an installed wheel, not from this folder."""
    if item.path.suffix != ".ipynb":
        return (yield)
    from tests.wheel import wheel_first

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", wheel_first())
        return (yield)


def _needs_model(item: pytest.Item) -> bool:
    uses = "model_path" in getattr(item, "fixturenames", ()) or item.get_closest_marker("real_model") is not None
    return uses or item.path.suffix == ".ipynb"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model, SmolLM2-135M-Instruct in Q4_1, in the cache."""
    from rvllm import hub

    return hub.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def rt():
    """The device that kernel tests run on: RVLLM_TEST_DEVICE (cuda, cuda:1), else the emulator in check mode."""
    from rvllm import emulator
    from rvllm.runtime import Runtime

    device = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
    works, reason = emulator.available("check")
    if device == "emulator" and not works:
        pytest.skip(reason)
    return Runtime(device, mode="check")


@pytest.fixture(params=["in order", "reversed"])
def device(rt, request):
    """The same device, the emulator's threads in order and reversed: a right kernel does not mind."""
    if request.param == "reversed" and rt.is_cuda:
        pytest.skip("a GPU chooses its own order")
    rt.reverse = request.param == "reversed"
    yield rt
    rt.reverse = False
