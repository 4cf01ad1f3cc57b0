"""The cell magic `%%cuda`: silent where the text runs, a word where nothing would run it, an error for a wrong line."""

import json
from pathlib import Path

import pytest

from rvllm import notebook
from rvllm.notebook import CellError, cuda_cell
from rvllm.runtime import LIVE_SOURCES

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def kernel(*names: str) -> str:
    return "\n".join(
        f'extern "C" __global__ void __launch_bounds__(256) {name}(float* x, int n) {{ }}' for name in names
    )


@pytest.fixture(autouse=True)
def live():
    """A table of cells that is empty, and put back afterwards."""
    before = dict(LIVE_SOURCES)
    LIVE_SOURCES.clear()
    yield LIVE_SOURCES
    LIVE_SOURCES.clear()
    LIVE_SOURCES.update(before)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_the_courses_own_cells_are_silent(path, capsys):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text.startswith("%%cuda"):
            cuda_cell(*text.removeprefix("%%cuda").split("\n", 1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("rmsnorm", kernel("rmsnorm")),
        ("rmsnorm", kernel("helper", "rmsnorm")),
        ("rmsnorm --draft", kernel("rmsnorm")),
        ("my_own --draft", kernel("my_own")),
        ("warp --header", "int lane();"),
        ("warp --header --draft", "int lane();"),
    ],
)
def test_a_cell_that_something_launches_is_silent(line, text, capsys, live):
    cuda_cell(line, text)
    assert capsys.readouterr().out == ""
    assert list(live.values()) == [text]


def test_a_header_of_another_cell_is_silent(capsys):
    cuda_cell("my_own --draft", f'#include "my_parts.cuh"\n{kernel("my_own")}')
    cuda_cell("my_parts --header", "int part();")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        ("rmsnrom", kernel("rmsnrom"), ["no kernel of the package has this name", "nothing", "did you mean rmsnorm?"]),
        ("rmsnrom", kernel("rmsnorm"), ["defines rmsnorm", "nothing launches it", "did you mean rmsnorm?"]),
        ("rmsnorm", kernel("rmsnrom"), ["defines rmsnrom", "looks for rmsnorm", "nothing launches it"]),
        ("rmsnorm --draft", kernel("rmsnrom"), ["defines rmsnrom", "nothing launches it"]),
        ("rmsnorm", f"// {kernel('rmsnorm')}", ["defines no kernel"]),
        ("rmsnorm", "/*\n" + kernel("rmsnorm") + "*/", ["defines no kernel"]),
        ("my_own_idea", kernel("my_own_idea"), ["no kernel of the package has this name", "--draft"]),
        ("warp", kernel("warp"), ["warp is a header", "--header"]),
        ("wrap --header", "int lane();", ["no kernel includes wrap.cuh", "did you mean warp?"]),
        ("rmsnorm --header", kernel("rmsnorm"), ["no kernel includes rmsnorm.cuh", "rmsnorm is a kernel"]),
        ("my_own_parts --header", "int part();", ["no kernel includes my_own_parts.cuh"]),
        ("mine --header", '#include "mine.cuh"', ["no kernel includes mine.cuh"]),
    ],
)
def test_a_text_that_nothing_launches_is_told(line, text, words, capsys, live):
    cuda_cell(line, text)
    told = capsys.readouterr().out
    assert told.startswith(f"%%cuda {line}: ")
    assert told.count("\n") == 1
    assert [word for word in words if word not in told] == []
    assert list(live.values()) == [text]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rmsnorm --drfat", "%%cuda rmsnorm: found '--drfat'; allowed: --draft, --header"),
        ("rmsnorm --header --Draft", "%%cuda rmsnorm: found '--Draft'; allowed: --draft, --header"),
        ("rmsnorm softmax", "%%cuda rmsnorm: found 'softmax'; allowed: --draft, --header"),
        ("", "%%cuda: found ''; allowed: %%cuda NAME"),
        ("--draft", "%%cuda: found '--draft'; allowed: %%cuda NAME"),
        ("rmsnorm.cu", "%%cuda: found 'rmsnorm.cu'; allowed: %%cuda NAME"),
        ("../rmsnorm", "%%cuda: found '../rmsnorm'; allowed: %%cuda NAME"),
    ],
)
def test_a_wrong_line_is_an_error_and_changes_nothing(line, message, live):
    with pytest.raises(CellError) as caught:
        cuda_cell(line, kernel("rmsnorm"))
    assert str(caught.value).startswith(message)
    assert live == {}


def test_every_header_of_the_package_is_included_by_something():
    assert [name for name in notebook.package_files("cuh") if notebook.remark_on_header(name)] == []
