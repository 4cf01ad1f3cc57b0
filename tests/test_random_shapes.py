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

from rvllm.fast_model import WIDE
from rvllm.runtime import Runtime
from tests.random_shapes import MODELS, PAGE, Case, Shape, cases, check

FOUND = json.loads((Path(__file__).parent / "data/random_shapes.json").read_text())
# k-blocks without a divisor that fits; 2, 2 and 0 row tiles of the FFN left for a block of three; vocabularies of 15, 0
# and 1 modulo 16; one KV head with several queries, several with several, several with one.
SHAPES = [
    Shape(1, 3, 1, 64, 544, 303, "Q8_0"),
    Shape(1, 4, 2, 64, 256, 416, "Q4_K"),
    Shape(1, 2, 2, 128, 96, 273, "F16"),
]
ROWS = (1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97)


def ones(*counts: int, of: int) -> tuple[tuple[int, ...], ...]:
    """Steps in which so many of the sequences get a token each."""
    return tuple((1,) * n + (0,) * (of - n) for n in counts)


ROOM = 5 * PAGE
LENGTHS = tuple(i % 20 for i in range(97))
Q8_0, Q4_K, F16 = SHAPES
EDGES = [
    ("each number of rows", Q8_0, Case("fused", False, WIDE, 97, 97, 3, LENGTHS, ones(*ROWS, of=97), 0)),
    ("all rows exactly", Q8_0, Case("fused", True, WIDE, 97, 97, 3, LENGTHS, ones(17, 97, of=97), 0)),
    # Some tokens make twenty times more of what halfs lose than others; with seed 2 none does.
    ("wide steps of each number", Q4_K, Case("graph", False, 3, 97, 97, 3, LENGTHS, ones(*ROWS, of=97), 2)),
    # Two queries to each of two KV heads, contexts of two stages; tiles full, one more, and one less.
    ("chunks at 1 modulo 16", Q4_K, Case("graph", False, 3, 250, 3, 10, (65, 1, 17), ((64, 65, 63), (30, 1, 2)), 0)),
    ("the same chunks, packed", Q4_K, Case("fused", False, WIDE, 250, 3, 10, (65, 1, 17), ((64, 65, 63),), 0)),
    *(
        (f"idle at its last position, {variant}", Q4_K, Case(variant, False, WIDE, 8, 3, 5, (ROOM - 1, 3, 9), steps, 0))
        for variant in MODELS
        for steps in [((1, 1, 1), (0, 1, 0), (0, 0, 1))]
    ),
    *(
        (
            f"{n} k-blocks",
            Shape(1, 3, 1, 64, 32 * n, 273, "Q4_0"),
            Case("fused", False, WIDE, 20, 20, 1, (0,) * 20, steps, 0),
        )
        for n in (34, 152)
        for steps in [ones(1, 20, of=20)]
    ),
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


@pytest.mark.parametrize(("shape", "case"), [pytest.param(*rest, id=why) for why, *rest in EDGES])
def test_sizes_that_matter(rt: Runtime, path_of: Callable[[Shape], Path], shape: Shape, case: Case) -> None:
    """Those of `rvllm.kernels.sizes` that random ones of a few seconds might miss."""
    check(rt, path_of(shape), case)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_sizes(rt: Runtime, path_of: Callable[[Shape], Path], shape: Shape) -> None:
    path = path_of(shape)

    @settings(
        max_examples=10,
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
