"""Steps of random sizes through every variant, beside NumPy's model; and those on which one once went wrong.

On the emulator in check mode by default, on a GPU with RVLLM_TEST_DEVICE=cuda. `python -m tests.random_shapes` tries
more shapes, and says what to add to tests/data/random_shapes.json if one fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from rvllm.runtime import Runtime
from tests.random_shapes import Case, Shape, cases, check

FOUND = json.loads((Path(__file__).parent / "data/random_shapes.json").read_text())
# Odd and even numbers of k-blocks, 17 of them (a prime), one group of query heads and several, all types but one.
SHAPES = [
    Shape(1, 3, 1, 64, 544, 301, "Q8_0"),
    Shape(1, 4, 2, 64, 256, 416, "Q4_K"),
    Shape(1, 2, 2, 128, 96, 277, "F16"),
]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Path]:
    """A model file of a shape, written once."""
    folder, known = tmp_path_factory.mktemp("shapes"), dict[Shape, Path]()

    def find(shape: Shape) -> Path:
        if shape not in known:
            known[shape] = shape.write(folder / f"{len(known)}.gguf")
        return known[shape]

    return find


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found["why"])
def test_what_once_went_wrong(rt: Runtime, path_of: Callable[[Shape], Path], found: dict[str, Any]) -> None:
    check(rt, path_of(Shape(**found["shape"])), Case.of(found["case"]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_sizes(rt: Runtime, path_of: Callable[[Shape], Path], shape: Shape) -> None:
    path = path_of(shape)

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def attempt(case: Case) -> None:
        check(rt, path, case)

    attempt()
