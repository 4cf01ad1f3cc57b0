"""tools/nb.py on toy projects: every rule of export, clean and run, each with its message and exit code."""

from __future__ import annotations

import copy
import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
TOOL = REPOSITORY / "tools" / "nb.py"
sys.path.insert(0, str(TOOL.parent))
import nb  # noqa: E402
import nb_clean  # noqa: E402
import nb_export  # noqa: E402

TITLE = "# 01 · Alpha\n\n> Read the first letter.\n\nProse."
SETUP = """\
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("rvllm") is None:
    !pip install -q "rvllm @ git+https://github.com/some/where"
%load_ext rvllm.notebook"""
BADGE = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/some/where/blob/main/notebooks/01_alpha.ipynb)"
)
IMPORTS = '#| export\nfrom __future__ import annotations\n\nimport os\n\nNAME = "a"'
FUNCTION = '#| export\ndef first() -> str:\n    """The first letter."""\n    return NAME + os.sep'
KERNEL = "__global__ void add(float *x) {\n    x[0] += 1.0f;\n}"


def code(text: str, outputs: list[dict[str, Any]] | None = None, **metadata: Any) -> dict[str, Any]:
    """A code cell as an author may write it: a string as source, no id."""
    cell = {"cell_type": "code", "execution_count": 3, "source": text}
    return cell | {"metadata": metadata, "outputs": outputs or []}


def text_output(text: str, name: str = "stdout") -> dict[str, Any]:
    """A printed output."""
    return {"output_type": "stream", "name": name, "text": text}


class Project:
    """A toy project below a temporary folder, and the tool run on it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys, self.out = root, capsys, ""
        self.set_url("https://github.com/some/where")
        for folder in ("notebooks/solutions", "rvllm/kernels"):
            (root / folder).mkdir(parents=True)
        (root / "rvllm/__init__.py").write_text('"""Toy."""\n')

    def set_url(self, url: str) -> None:
        """The one line that an author changes."""
        old = REPOSITORY.joinpath("pyproject.toml").read_text()
        line = next(line for line in old.splitlines() if line.startswith("Repository ="))
        (self.root / "pyproject.toml").write_text(old.replace(line, f'Repository = "{url}"'))

    def add(self, name: str, *cells: str | dict[str, Any], title: str = TITLE, default: str | None = "alpha") -> Path:
        """Write a notebook: title, setup cell and the given cells (a string is a code cell)."""
        setup = code(f"#| default_exp {default}\n" if default else "", tags=["setup"])
        first = {"cell_type": "markdown", "metadata": {}, "source": title}
        rest = [code(cell) if isinstance(cell, str) else cell for cell in cells]
        path = self.root / "notebooks" / f"{name}.ipynb"
        raw = {"cells": [first, setup, *rest], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path.write_text(json.dumps(raw))
        return path

    def __call__(self, *argv: str) -> int:
        """Run the tool in this process; its output, errors included, is left in `out`."""
        result = nb.main([*argv, "--root", str(self.root)])
        captured = self.capsys.readouterr()
        self.out = captured.out + captured.err
        return result

    def read(self, name: str) -> str:
        """A file's text."""
        return (self.root / name).read_text(encoding="utf-8")

    def edit(self, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a notebook's JSON in place."""
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw, indent=1, sort_keys=True, ensure_ascii=False) + "\n")

    def files(self) -> dict[str, bytes]:
        """Everything that lies in the project."""
        return {str(p): p.read_bytes() for p in sorted(self.root.rglob("*")) if p.is_file()}

    def record(self, path: Path) -> None:
        """Put down the hashes as a run would, without running."""
        notebook = nb.Notebook.load(path, self.root)
        done = nb_clean.cleaned(notebook, nb_clean.Repository.of(self.root))
        nb.nb_run.record(done, "cpu")
        path.write_text(done.text())


@pytest.fixture
def toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """An empty toy project."""
    return Project(tmp_path, capsys)


# --- export: what is written -------------------------------------------------------------------------------


def test_module_layout(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS, "first()", FUNCTION)
    assert toy("export") == 0
    origin = "Generated from notebooks/01_alpha.ipynb; edit there, then run: python tools/nb.py export"
    assert (
        toy.read("rvllm/alpha.py")
        == f'''\
"""Read the first letter.

{origin}
"""

from __future__ import annotations

import os

NAME = "a"


def first() -> str:
    """The first letter."""
    return NAME + os.sep
'''
    )


def test_exporting_twice_changes_nothing(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS, FUNCTION, f"%%cuda add\n{KERNEL}", '#| export q\n#| doc "Quoted" text.\nX = 1')
    assert toy("export") == 0
    before = toy.files()
    assert toy("export") == 0
    assert toy.out == ""
    assert toy.files() == before
    assert toy("export", "--check") == 0


def test_several_modules_with_own_docstrings(toy: Project) -> None:
    other = "#| export sub.beta\n#| doc A path \\n of its own.\nX = 1"
    toy.add("01_alpha", IMPORTS, other, "#| export gamma\nY = 2")
    assert toy("export") == 0
    assert toy.read("rvllm/sub/beta.py").startswith('r"""A path \\n of its own.\n\nGenerated from notebooks/01')
    assert toy.read("rvllm/sub/beta.py").endswith('"""\n\nX = 1\n')
    assert toy.read("rvllm/gamma.py").startswith('"""Read the first letter.\n')


def test_append_names_all_notebooks_in_order(toy: Project) -> None:
    toy.add("05_a", "#| export ops\nimport os\n\n\ndef a() -> str:\n    return os.sep", default=None)
    toy.add("06_b", "#| export ops --append\ndef b() -> str:\n    return os.sep", default=None)
    assert toy("export") == 0
    text = toy.read("rvllm/ops.py")
    assert "Generated from notebooks/05_a.ipynb, notebooks/06_b.ipynb; edit there" in text
    assert text.index("def a") < text.index("def b")


def test_kernels_drafts_headers_and_concatenation(toy: Project) -> None:
    cells = [
        f"%%cuda add_v1 --draft\n{KERNEL}",
        "%%cuda half --header\n#define H 0.5f",
        f"%%cuda add\n{KERNEL}\n",
    ]
    toy.add("05_first", *cells, "%%cuda add\n__global__ void sub() {}", default=None)
    assert toy("export") == 0
    origin = "// Generated from notebooks/05_first.ipynb; edit there, then run: python tools/nb.py export\n\n"
    assert toy.read("rvllm/kernels/add.cu") == f"{origin}{KERNEL}\n\n__global__ void sub() {{}}\n"
    assert toy.read("rvllm/kernels/half.cuh") == f"{origin}#define H 0.5f\n"
    assert sorted(p.name for p in (toy.root / "rvllm/kernels").iterdir()) == ["add.cu", "half.cuh"]


FIRSTS = {
    "imports": "from __future__ import annotations\n\nimport os",
    "type checking": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import os",
    "constant": "A = 1",
    "class": "class G:\n    x = 1",
}
SECONDS = [
    "X = 1",
    "# Why.\nX = 1",
    "def f() -> int:\n    return 1",
    "# Why.\nclass F:\n    x = 1",
    "if 1:\n    X = 1",
]


def test_output_passes_ruff_unchanged(toy: Project) -> None:
    long_doc = "#| doc " + "A sentence that goes on and on, " * 5 + "to its end."
    cells = []
    for i, first in enumerate(FIRSTS.values()):
        for j, second in enumerate(SECONDS):
            cells += [
                f"#| export m{i}{j}\n{long_doc if i == j else ''}\n{first}",
                f"#| export m{i}{j}\n{second}",
            ]
    toy.add("01_alpha", *cells)
    assert toy("export") == 0
    for command in (["format", "--check"], ["check", "--select", "I,E", "--ignore", "F"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "rvllm"]
        done = subprocess.run(ruff, cwd=toy.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# --- export: differences -----------------------------------------------------------------------------------


def test_edited_generated_file_names_file_and_notebook(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS, FUNCTION)
    toy("export")
    file = toy.root / "rvllm/alpha.py"
    file.write_text(file.read_text().replace("NAME + os.sep", "NAME"))
    before = toy.files()
    assert toy("export", "--check") == 1
    assert "rvllm/alpha.py: differs" in toy.out
    assert "carry them to notebooks/01_alpha.ipynb" in toy.out
    assert "-    return NAME\n+    return NAME + os.sep" in toy.out
    assert toy.files() == before


def test_long_difference_is_cut(toy: Project) -> None:
    toy.add("01_alpha", "#| export\n" + "\n".join(f"A{i} = {i}" for i in range(50)))
    assert toy("export", "--check") == 1
    assert "rvllm/alpha.py: missing" in toy.out
    assert len(toy.out.splitlines()) == 41


def test_stale_module_is_reported_then_removed(toy: Project) -> None:
    path = toy.add("01_alpha", IMPORTS, f"%%cuda add\n{KERNEL}")
    toy("export")
    path.unlink()
    assert toy("export", "--check") == 1
    assert "rvllm/alpha.py: stale" in toy.out
    assert "rvllm/kernels/add.cu: stale" in toy.out
    assert toy("export") == 0
    assert sorted(p.name for p in (toy.root / "rvllm").rglob("*.*")) == ["__init__.py"]


def test_hand_written_file_is_not_overwritten(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS)
    (toy.root / "rvllm/alpha.py").write_text("X = 1\n")
    assert toy("export") == 2
    assert "notebooks/01_alpha.ipynb: exports rvllm/alpha.py, but there is a file without the line" in toy.out
    assert toy.read("rvllm/alpha.py") == "X = 1\n"


# --- export: broken rules ----------------------------------------------------------------------------------

LONG = "\n".join(f"x{i} = {i}" for i in range(61))
LONG_CLASS = "class A:\n" + "\n".join(f"    x{i} = {i}" for i in range(150))
BROKEN = {
    "does not parse": (["#| export\ndef f(:"], "cell 3: does not parse as Python"),
    "unfinished class": (["#| export\nclass A:"], "cell 3: does not parse as Python"),
    "magic": (["#| export\n%time f()"], "cell 3: a magic cannot be exported: %time f()"),
    "shell": (["#| export\nx = !ls"], "cell 3: a magic cannot be exported: x = !ls"),
    "get_ipython": (["#| export\nx = get_ipython()"], "cell 3: get_ipython exists only in a notebook"),
    "empty": (["#| export"], "cell 3: nothing to export"),
    "star": (["#| export\nfrom os import *"], "cell 3: `from os import *`"),
    "body is dots": (["#| export\ndef f() -> None:\n    '''Later.'''\n    ..."], "`f` is not finished"),
    "body is pass": (["#| export\nclass A:\n    pass"], "`A` is not finished"),
    "patched": (["#| export\nA.run = 1"], "cell 3: sets an attribute"),
    "twice": (
        ["#| export\nclass A:\n    x = 1"] * 2,
        "cell 4: `A` is already defined in rvllm/alpha.py by notebooks/",
    ),
    "late import": (
        ["#| export\nX = 1", "#| export\nimport os"],
        "cell 4: import in a later cell of rvllm/alpha.py",
    ),
    "late guarded": (
        ["#| export\nX = 1", "#| export\nif X:\n    import os"],
        "cell 4: import in a later cell",
    ),
    "late mark": (["import os\n#| export"], "cell 3: `#| export` must stand at the top"),
    "late cell magic": (["%%time\n#| export\nX = 1"], "cell 3: `#| export` must stand at the top"),
    "unknown mark": (["#| exports\nX = 1"], "cell 3: marks are"),
    "second default": (["#| default_exp b\nX = 1"], "cell 3: a second `#| default_exp`"),
    "bad module": (["#| export a-b\nX = 1"], "cell 3: `#| export a-b`: expected"),
    "bad option": (["#| export a --apend\nX = 1"], "cell 3: `#| export a --apend`: expected"),
    "lone doc": (["#| doc Text.\nX = 1"], "cell 3: `#| doc` belongs below"),
    "late doc": (
        ["#| export\nX = 1", "#| export\n#| doc T.\nY = 1"],
        "cell 4: `#| doc` belongs to the first",
    ),
    "empty doc": (["#| export\n#| doc\nX = 1"], "cell 3: `#| doc` needs one plain sentence"),
    "append first": (["#| export b --append\nX = 1"], "cell 3: no earlier notebook exports rvllm/b.py"),
    "long demo": ([LONG], "cell 3: 61 lines"),
    "long functions": ([f"#| export\n{LONG}"], "cell 3: 61 lines"),
    "long class": ([f"#| export\n{LONG_CLASS}"], "cell 3: 151 lines"),
    "long kernel": (["%%cuda add --draft\n" + "int x;\n" * 71], "cell 3: 71 lines of CUDA"),
    "kernel without name": (["%%cuda\nint x;"], "cell 3: a CUDA cell starts with"),
    "empty kernel": (["%%cuda add\n\n"], "cell 3: a CUDA cell starts with"),
    "kernel option": (
        ["%%cuda add --drfat\nint x;"],
        "cell 3: %%cuda knows --draft and --header, not --drfat",
    ),
}


@pytest.mark.parametrize(("cells", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_rule(toy: Project, cells: list[str], message: str) -> None:
    toy.add("01_alpha", *cells)
    before = toy.files()
    assert toy("export") == 2
    assert toy.out.startswith("notebooks/01_alpha.ipynb, cell ")
    assert message in toy.out
    assert len(toy.out.splitlines()) == 1
    assert toy.files() == before


@pytest.mark.parametrize("name", sorted(nb_export.HAND_WRITTEN | {"kernels", "sub.__init__"}))
def test_hand_written_name_is_refused(toy: Project, name: str) -> None:
    toy.add("01_alpha", f"#| export {name}\nX = 1")
    assert toy("export") == 2
    assert "is written by hand and may not be exported" in toy.out


def test_allowed_at_the_limit(toy: Project) -> None:
    class_cell = "#| export\n#| doc Text.\n" + "\n".join(LONG_CLASS.splitlines()[:150])
    empty = "#| export\nclass Empty(Exception):\n    '''Nothing there.'''"
    late = "#| export\ndef late() -> object:\n    import os\n\n    return os"
    demo = "%%time\n" + LONG[: LONG.index("x59")]
    toy.add("01_alpha", class_cell, empty, late, demo, "%%cuda add --draft\n" + "int x;\n" * 70)
    assert toy("export") == 0


def test_export_without_module(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS, default=None)
    assert toy("export") == 2
    assert "cell 3: `#| export` without a module" in toy.out


def test_module_without_docstring(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS, title="# Alpha")
    assert toy("export") == 2
    assert "cell 3: rvllm/alpha.py has no docstring" in toy.out


def test_two_notebooks_one_file(toy: Project) -> None:
    toy.add("01_a", IMPORTS, f"%%cuda add\n{KERNEL}")
    toy.add("02_b", "#| export\nX = 1", f"%%cuda add\n{KERNEL}")
    assert toy("export") == 2
    assert "02_b.ipynb, cell 3: rvllm/alpha.py is already exported by notebooks/01_a.ipynb; use --append" in toy.out
    assert "02_b.ipynb, cell 4: rvllm/kernels/add.cu is already exported by notebooks/01_a.ipynb; give" in toy.out


def test_every_broken_notebook_is_named(toy: Project) -> None:
    toy.add("01_a", "#| export\ndef f(:")
    (toy.root / "notebooks/02_b.ipynb").write_text("{")
    (toy.root / "notebooks/03_c.ipynb").write_text('{"nbformat": 3}')
    (toy.root / "notebooks/04_d.ipynb").write_text('{"nbformat": 4, "cells": [{}]}')
    assert toy("export") == 2
    assert [line.split(":")[0].split(",")[0] for line in toy.out.splitlines()] == [
        f"notebooks/{name}.ipynb" for name in ("01_a", "02_b", "03_c", "04_d")
    ]


# --- clean -------------------------------------------------------------------------------------------------


def messy_cell() -> dict[str, Any]:
    """What JupyterLab and Colab leave behind."""
    picture = {"image/png": "iVBORw0KGgo=\n", "text/plain": "<Figure>"}
    colab = {"application/vnd.google.colaboratory.intrinsic+json": {"type": "string"}}
    show = {
        "output_type": "display_data",
        "metadata": {"image/png": {"alt": "A"}},
        "transient": {},
        "data": picture,
    }
    result = {
        "output_type": "execute_result",
        "execution_count": 7,
        "metadata": {},
        "data": colab | {"text/plain": "1"},
    }
    only_colab = {"output_type": "display_data", "metadata": {}, "data": colab}
    outputs = [text_output("a\nb"), text_output("c\n"), show, only_colab, result]
    return code("print(1)", outputs, id="colab_id-1", colab={"base_uri": "x"}, tags=["t"], execution={"a": 1})


def test_clean_drops_what_is_volatile_and_is_idempotent(toy: Project) -> None:
    path = toy.add("01_alpha", messy_cell(), "%%cuda x --draft\nint x;", "same", "same")

    def mess(raw: dict[str, Any]) -> None:
        gpu = {"gpuType": "T4", "provenance": []}
        raw["metadata"] = {"colab": gpu, "accelerator": "GPU", "widgets": {}, "kernelspec": {"name": "conda"}}

    toy.edit(path, mess)
    assert toy("clean") == 0
    text = path.read_text(encoding="utf-8")
    raw = json.loads(text)
    assert raw["metadata"] == {
        "accelerator": "GPU",
        "colab": {"gpuType": "T4"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    cell, kernel = raw["cells"][2:4]
    assert (cell["id"], cell["metadata"], cell["execution_count"]) == ("colab_id-1", {"tags": ["t"]}, None)
    assert kernel["metadata"] == {"magics_language": "cuda"}
    stream, shown, result = cell["outputs"]
    assert stream["text"] == ["a\n", "bc\n"]
    assert shown["data"] == {"image/png": "iVBORw0KGgo=", "text/plain": ["<Figure>"]}
    assert shown["metadata"] == {"image/png": {"alt": "A"}}
    assert (result["data"], result["execution_count"]) == ({"text/plain": ["1"]}, None)
    assert len({c["id"] for c in raw["cells"]}) == 6
    assert toy("clean") == 0
    assert path.read_text(encoding="utf-8") == text
    nbformat.validate(raw)
    assert nbformat.writes(nbformat.from_dict(copy.deepcopy(raw))).rstrip("\n") + "\n" == text


def test_new_ids_are_stable(toy: Project) -> None:
    texts = []
    for _ in range(2):
        path = toy.add("01_alpha", "x = 1", "x = 1", "y = 2")
        toy("clean")
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_check_shows_the_difference_and_changes_nothing(toy: Project) -> None:
    path = toy.add("01_alpha")
    before = path.read_bytes()
    assert toy("clean", "--check") == 1
    assert "notebooks/01_alpha.ipynb: differs; mend it with: python tools/nb.py clean" in toy.out
    assert path.read_bytes() == before
    assert toy("clean") == 0
    assert toy("clean", "--check") == 0
    assert toy.out == ""


def test_badge_and_setup_are_generated(toy: Project) -> None:
    path = toy.add("01_alpha")
    toy("clean")
    title, setup = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    assert title == f"# 01 · Alpha\n\n> Read the first letter.\n\n{BADGE}\n\nProse."
    assert setup == f"#| default_exp alpha\n{SETUP}"


@pytest.mark.parametrize(
    "line",
    ["from matplotlib import pyplot", "from rvllm import bench, plots", "from rvllm.trace_plots import timeline"],
)
def test_a_notebook_that_draws_installs_what_draws(toy: Project, line: str) -> None:
    path = toy.add("01_alpha", f"x = 1\n{line}")
    toy("clean")
    assert '"rvllm[plots] @ git+https' in "".join(json.loads(path.read_text())["cells"][1]["source"])


def test_changing_the_address_is_one_line_and_one_command(toy: Project) -> None:
    path = toy.add("01_alpha", "x = 1")
    solution = path.rename(toy.root / "notebooks/solutions/01_alpha.ipynb")
    path = toy.add("01_alpha", "x = 1")
    toy("clean")
    for each in (path, solution):
        toy.record(each)
    assert toy("clean", "--check") == 0
    toy.set_url("https://github.com/new-owner/new.repo.git")
    assert toy("clean", "--check") == 1
    assert toy("clean") == 0
    assert toy("clean", "--check") == 0, "the stored outputs stay valid"
    for each in (path, solution):
        text = each.read_text()
        assert text.count("github.com/new-owner/new.repo") == 1
        name = each.relative_to(toy.root).as_posix()
        assert f"research.google.com/github/new-owner/new.repo/blob/main/{name})" in text
        assert "some/where" not in text


@pytest.mark.parametrize("url", ["https://example.org/a/b", "https://github.com/only-owner"])
def test_address_must_be_on_github(toy: Project, url: str) -> None:
    toy.set_url(url)
    assert toy("clean") == 2
    assert "pyproject.toml: Repository must be https://github.com/OWNER/REPO" in toy.out


def drop_setup_tag(raw: dict[str, Any]) -> None:
    raw["cells"][1]["metadata"] = {}


def second_setup(raw: dict[str, Any]) -> None:
    raw["cells"].append(code("x", tags=["setup"]))


def setup_not_first(raw: dict[str, Any]) -> None:
    raw["cells"].insert(1, code("x"))


def no_title(raw: dict[str, Any]) -> None:
    raw["cells"].pop(0)


SHAPES = {
    drop_setup_tag: "no setup cell: tag the first code cell `setup`",
    second_setup: "cell 3: one setup cell, and it is the first code cell",
    setup_not_first: "cell 3: one setup cell, and it is the first code cell",
    no_title: "no place for the Colab badge",
}


@pytest.mark.parametrize(("change", "message"), SHAPES.items())
def test_notebook_without_its_fixed_cells(toy: Project, change: Callable[..., object], message: str) -> None:
    path = toy.add("01_alpha")
    toy.edit(path, change)
    before = toy.files()
    assert toy("clean", "--check") == 2
    assert toy("clean") == 2
    assert "notebooks/01_alpha.ipynb" in toy.out
    assert message in toy.out
    assert toy.files() == before


def test_broken_notebook_does_not_keep_others_from_being_cleaned(toy: Project) -> None:
    toy.add("01_alpha", title="No title")
    toy.add("02_beta")
    assert toy("clean") == 2
    assert "notebooks/01_alpha.ipynb: no place" in toy.out
    assert "notebooks/02_beta.ipynb: written" in toy.out


# --- stored outputs ----------------------------------------------------------------------------------------


def recorded(toy: Project) -> Path:
    """A notebook whose stored outputs are in order."""
    path = toy.add("01_alpha", code("print(1)", [text_output("1\n")]))
    toy.record(path)
    assert toy("clean", "--check") == 0
    return path


def test_outputs_without_a_run(toy: Project) -> None:
    toy.add("01_alpha", code("print(1)", [text_output("1\n")]))
    assert toy("clean") == 0
    assert toy("clean", "--check") == 1
    assert "01_alpha.ipynb: its outputs were never recorded; run: python tools/nb.py run 01_alpha" in toy.out


def test_code_edited_after_its_run(toy: Project) -> None:
    path = recorded(toy)
    toy.edit(path, lambda raw: raw["cells"][2].update(source=["print(2)"]))
    assert toy("clean", "--check") == 1
    assert "belong to other code than the present; run: python tools/nb.py run 01_alpha" in toy.out


def test_typed_output(toy: Project) -> None:
    path = recorded(toy)
    toy.edit(path, lambda raw: raw["cells"][2]["outputs"][0].update(text=["2\n"]))
    assert toy("clean", "--check") == 1
    assert "the stored outputs are not those that its run recorded" in toy.out


def test_prose_may_change_without_a_run(toy: Project) -> None:
    path = recorded(toy)
    toy.edit(path, lambda raw: raw["cells"][0]["source"].append("\n\nMore."))
    toy("clean")
    assert toy("clean", "--check") == 0


def test_stored_error(toy: Project) -> None:
    error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    path = toy.add("01_alpha", code("1 / 0", [error]))
    toy.record(path)
    assert toy("clean", "--check") == 1
    assert "notebooks/01_alpha.ipynb, cell 3: a stored output is an error" in toy.out


# --- run (each starts kernels) -----------------------------------------------------------------------------


@pytest.fixture
def runnable(toy: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A toy project whose setup cell works and which knows its device."""
    monkeypatch.setenv("RVLLM_NOTEBOOK_SCALE", "small")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (toy.root / "rvllm/notebook.py").write_text("def load_ipython_extension(shell):\n    pass\n")
    (toy.root / "rvllm/device.py").write_text('def describe_device():\n    return "Toy card"\n')
    return toy


def test_run_stores_outputs_and_their_hash(runnable: Project) -> None:
    show = "import os\n\nprint(os.path.basename(os.getcwd()), os.environ.get('RVLLM_NOTEBOOK_SCALE', 'full'))"
    path = runnable.add("01_alpha", show, "import rvllm\n\nprint(rvllm.__file__)\nrvllm.__doc__")
    other = runnable.add("02_beta", "print(1)").read_bytes()
    assert runnable("run", "01", "--scale", "small") == 0
    assert "passed" in runnable.out
    assert "outputs_sha256" not in path.read_text(), "a trial run stores nothing"
    assert runnable("run", "01") == 0
    assert "cell 4: note: its output shows where the project lies" in runnable.out
    assert "slowest cell" in runnable.out
    assert "device Toy card" in runnable.out
    raw = json.loads(path.read_text())
    assert raw["cells"][2]["outputs"][0]["text"] == ["notebooks full\n"]
    assert raw["cells"][3]["outputs"][1]["data"]["text/plain"] == ["'Toy.'"]
    stored = raw["metadata"]["rvllm"]
    assert stored["device"] == "Toy card"
    assert datetime.date.fromisoformat(stored["date"])
    assert len(stored["code_sha256"]) == 64
    assert len(raw["cells"]) == 4
    assert (runnable.root / "notebooks/02_beta.ipynb").read_bytes() == other
    assert runnable("clean", "--check") == 1
    assert "01_alpha" not in runnable.out


def test_failing_run_leaves_the_file_alone(runnable: Project) -> None:
    before = runnable.add("01_alpha", "print(1)", "def f():\n    raise ValueError('no such thing')", "f()").read_bytes()
    assert runnable("run") == 1
    assert "notebooks/01_alpha.ipynb, cell 5: ValueError: no such thing" in runnable.out
    assert "f()" in runnable.out
    assert "\x1b" not in runnable.out
    assert (runnable.root / "notebooks/01_alpha.ipynb").read_bytes() == before


def test_error_that_the_cell_allows_is_not_stored(runnable: Project) -> None:
    before = runnable.add("01_alpha", code("1 / 0", tags=["raises-exception"])).read_bytes()
    assert runnable("run") == 1
    assert "cell 3: its output is an error" in runnable.out
    assert (runnable.root / "notebooks/01_alpha.ipynb").read_bytes() == before


def test_kernel_that_dies_and_notebook_edited_meanwhile(runnable: Project) -> None:
    runnable.add("01_alpha", "import os\n\nos._exit(3)")
    path = runnable.add("02_beta", "from pathlib import Path\n\nPath('02_beta.ipynb').open('a').write(' ')")
    assert runnable("run") == 2
    assert "01_alpha.ipynb, cell 3: DeadKernelError" in runnable.out
    assert "02_beta.ipynb: was edited while it ran; nothing stored" in runnable.out
    assert path.read_bytes().endswith(b" ")


def test_unknown_notebook(toy: Project) -> None:
    toy.add("01_alpha")
    assert toy("run", "07") == 2
    assert toy.out == "no notebook starts with 07\n"


# --- the command itself ------------------------------------------------------------------------------------


def test_command_line_needs_the_standard_library_only(toy: Project) -> None:
    toy.add("01_alpha", IMPORTS)
    command = [sys.executable, "-S", "-E", str(TOOL), "export", "--root", str(toy.root)]  # no site-packages
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "rvllm/alpha.py: written\n", done.stderr
