"""Notebook tooling: the notebooks are the source of the package. This exports, cleans and runs them.

    python tools/nb.py export [--check]              notebooks -> rvllm/*.py, rvllm/kernels/*.cu and *.cuh
    python tools/nb.py clean [--check]               stable files; badge and setup cell from pyproject.toml
    python tools/nb.py run [NN ...] [--scale small]  execute; store outputs, and hashes of code and outputs

Marks that a cell may begin with:
    #| default_exp gguf    in the setup cell: the module that a bare `#| export` goes to
    #| export [MODULE]     belongs to this module; with --append: to a module of an earlier notebook
    #| doc One sentence.   below a module's first `#| export`: its docstring (else the notebook's `> ` line)
    %%cuda NAME            a kernel file; --header: NAME.cuh; --draft: run in the notebook only

Exit code: 0 fine; 1 a difference under --check, or a failed run; 2 a broken rule (that notebook is not
written; export then writes nothing at all).
Only `run` needs more than the standard library (nbclient).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import nb_clean
import nb_export
import nb_run
from nb_common import Notebook, NotebookError, find_notebooks, settle

ROOT = Path(__file__).resolve().parents[1]


def each(notebooks: Iterable[Path], root: Path, work: Callable[[Notebook], None]) -> list[str]:
    """Do `work` on every notebook; return the errors, one line for each broken notebook."""
    errors = []
    for path in notebooks:
        try:
            work(Notebook.load(path, root))
        except NotebookError as error:
            errors.append(str(error))
    return errors


def complain(errors: list[str]) -> None:
    """End with all errors at once, if there are any."""
    if errors:
        raise NotebookError("\n".join(errors))


def export(root: Path, check: bool) -> int:
    """Write the modules and kernels that the notebooks export; remove those that none exports any more."""
    pieces: list[nb_export.Piece] = []
    notebooks = find_notebooks(root, solutions=False)
    complain(each(notebooks, root, lambda nb: pieces.extend(nb_export.pieces_of(nb))))
    files = nb_export.assemble(pieces)
    nb_export.refuse_hand_written(root, files)
    want = {root / name: file.text for name, file in files.items()}
    sources = {root / name: " or ".join(file.sources) for name, file in files.items()}
    remedy = "lines with - are only in the file: carry them to {}, then run: python tools/nb.py export"
    bad = settle(root, want, check, lambda path: remedy.format(sources[path]))
    for path in nb_export.stale_files(root, want):
        bad += 1
        print(f"{path.relative_to(root)}: {'stale, no notebook exports it' if check else 'removed'}")
        if not check:
            path.unlink()
    return int(check and bad > 0)


def clean(root: Path, check: bool) -> int:
    """Bring the notebooks into their stored form; say which outputs are not their code's."""
    repository = nb_clean.Repository.of(root)
    want: dict[Path, str] = {}
    problems: list[str] = []

    def work(nb: Notebook) -> None:
        done = nb_clean.cleaned(nb, repository)
        want[nb.path] = done.text()
        problems.extend(nb_clean.output_problems(done))

    errors = each(find_notebooks(root), root, work)
    bad = settle(root, want, check, lambda _: "mend it with: python tools/nb.py clean")
    print("\n".join(problems), end="\n" if problems else "")
    complain(errors)
    return int(check and bool(bad or problems))


def run(root: Path, wanted: list[str], scale: str | None) -> int:
    """Execute the wanted notebooks (all if none is named), each in a fresh kernel."""
    repository = nb_clean.Repository.of(root)
    paths = nb_run.select(find_notebooks(root), wanted)
    results: list[bool] = []
    complain(each(paths, root, lambda nb: results.append(nb_run.run_notebook(nb, root, repository, scale))))
    return int(not all(results))


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/nb.py", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("export", "notebooks -> package"), ("clean", "notebooks -> stable notebooks")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--check", action="store_true", help="change nothing; exit 1 on a difference")
    command = commands.add_parser("run", help="execute notebooks and store their outputs")
    command.add_argument("notebooks", nargs="*", metavar="NN", help="number or name; default: all")
    command.add_argument("--scale", choices=["small"], help="a quick trial run: nothing is stored")
    for command in commands.choices.values():
        command.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    try:
        if options.command == "run":
            return run(root, options.notebooks, options.scale)
        return {"export": export, "clean": clean}[options.command](root, options.check)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
