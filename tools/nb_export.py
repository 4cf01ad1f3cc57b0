"""`tools/nb.py export`: from tagged cells to the modules and kernels of the package."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nb_common import WIDTH, Notebook, NotebookError, source

PACKAGE = "rvllm"
HAND_WRITTEN = {
    "__init__",
    "__main__",
    "llm",
    "hub",
    "cli",
    "notebook",
    "plots",
    "device",
    "errors",
    "emulator",
}
DEMO_LINES, CLASS_LINES, KERNEL_LINES = 60, 150, 70

DIRECTIVE = re.compile(r"#\|\s*(\w+)[ \t]*(.*)")
LATE_DIRECTIVE = re.compile(r"^#\|\s*(default_exp|export|doc)\b", re.M)
EXPORT = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)?[ \t]*(--append)?")
CUDA = re.compile(r"%%cuda[ \t]+([^\W\d]\w*)([^\n]*)\n")
GENERATED = re.compile(r"^(?:// )?Generated from notebooks/", re.M)
Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Piece:
    """One exported cell: `target` is the file it goes to, `doc` the module's sentence if given here."""

    notebook: Notebook
    number: int
    target: str
    code: str
    append: bool = False
    doc: str | None = None

    def error(self, reason: str) -> NotebookError:
        """A one-line error about this cell."""
        return self.notebook.error(reason, self.number)


@dataclass
class File:
    """A generated file and the notebooks it comes from."""

    text: str
    sources: list[str]


# --- Reading cells --------------------------------------------------------------------------------


def pieces_of(nb: Notebook) -> list[Piece]:
    """What one notebook exports, in its order; every code cell is checked on the way."""
    found: list[Piece] = []
    default: str | None = None
    for number, cell in nb.cells("code"):
        text = source(cell)
        if text.startswith("%%cuda"):
            found.extend(cuda_piece(nb, number, text))
            continue
        marks, code = split_marks(nb, number, text)
        if "default_exp" in marks:
            if default:
                raise nb.error("a second `#| default_exp`; name the module in `#| export NAME` instead", number)
            default = marks["default_exp"]
        if "export" in marks:
            found.append(python_piece(nb, number, marks, code, default))
        elif "doc" in marks:
            raise nb.error("`#| doc` belongs below `#| export`", number)
        check_length(nb, number, code, exported="export" in marks)
    return found


def cuda_piece(nb: Notebook, number: int, text: str) -> Iterator[Piece]:
    """The kernel file that a %%cuda cell defines; nothing for a draft."""
    match = CUDA.match(text)
    if not match or not text[match.end() :].strip():
        raise nb.error("a CUDA cell starts with `%%cuda NAME`, and code below it", number)
    options = match[2].split()
    if unknown := set(options) - {"--draft", "--header"}:
        raise nb.error(f"%%cuda knows --draft and --header, not {' '.join(sorted(unknown))}", number)
    code = text[match.end() :].strip("\n")
    if (lines := code.count("\n") + 1) > KERNEL_LINES:
        raise nb.error(f"{lines} lines of CUDA; at most {KERNEL_LINES}: split it", number)
    if "--draft" not in options:
        suffix = "cuh" if "--header" in options else "cu"
        yield Piece(nb, number, f"{PACKAGE}/kernels/{match[1]}.{suffix}", code)


def split_marks(nb: Notebook, number: int, text: str) -> tuple[dict[str, str], str]:
    """Split a cell into its leading `#| mark value` lines and its code."""
    marks: dict[str, str] = {}
    lines = text.strip("\n").split("\n")
    while lines and lines[0].startswith("#|"):
        match = DIRECTIVE.fullmatch(lines.pop(0).rstrip())
        if not match or match[1] not in ("default_exp", "export", "doc") or match[1] in marks:
            raise nb.error("marks are `#| default_exp`, `#| export` and `#| doc`, each once", number)
        marks[match[1]] = match[2].strip()
    code = "\n".join(lines).strip("\n")
    if match := LATE_DIRECTIVE.search(code):
        raise nb.error(f"`#| {match[1]}` must stand at the top of its cell", number)
    return marks, code


def python_piece(nb: Notebook, number: int, marks: dict[str, str], code: str, default: str | None) -> Piece:
    """The exported cell, with its module resolved and its code checked."""
    match = EXPORT.fullmatch(marks["export"])
    if not match:
        raise nb.error(f"`#| export {marks['export']}`: expected a module name and perhaps --append", number)
    module = match[1] or default
    if not module:
        raise nb.error("`#| export` without a module, and no `#| default_exp NAME` before it", number)
    first, _, _ = module.partition(".")
    if first in HAND_WRITTEN or module == "kernels" or module.endswith("__init__"):
        raise nb.error(f"{PACKAGE}/{module.replace('.', '/')} is written by hand and may not be exported", number)
    target = f"{PACKAGE}/{module.replace('.', '/')}.py"
    piece = Piece(nb, number, target, code, bool(match[2]), marks.get("doc"))
    if piece.doc is not None and (not piece.doc or '"""' in piece.doc):
        raise piece.error("`#| doc` needs one plain sentence")
    check_code(piece)
    return piece


# --- Rules for one cell ---------------------------------------------------------------------------


def check_length(nb: Notebook, number: int, code: str, exported: bool) -> None:
    """A cell can be taken in at once: an exported class may be longer, the rest may not."""
    holds_class = exported and any(isinstance(node, ast.ClassDef) for node in ast.parse(code).body)
    limit = CLASS_LINES if holds_class else DEMO_LINES
    if (lines := code.count("\n") + 1) > limit:
        what = "an exported cell with a class" if holds_class else "a cell without an exported class"
        raise nb.error(f"{lines} lines; {what} has at most {limit}: split it", number)


def check_code(piece: Piece) -> None:
    """An exported cell is plain Python and holds whole definitions."""
    tree = parse(piece)
    if not tree.body:
        raise piece.error("nothing to export in this cell")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names):
            raise piece.error(f"`from {node.module} import *`; import the names")
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            raise piece.error("get_ipython exists only in a notebook; it cannot be exported")
    for node in tree.body:
        if isinstance(node, Definition) and unfinished(node):
            raise piece.error(f"`{node.name}` is not finished: export its final version")
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Attribute) for target in targets):
            raise piece.error("sets an attribute of something defined elsewhere; write it into the definition")


def parse(piece: Piece) -> ast.Module:
    """The cell's syntax tree; a magic is named as such."""
    try:
        return ast.parse(piece.code)
    except SyntaxError as error:
        line = (piece.code.splitlines() or [""])[(error.lineno or 1) - 1 :][:1]
        if line and re.match(r"\s*[%!]|.*=\s*[%!]|.*\?$", line[0]):
            raise piece.error(f"a magic cannot be exported: {line[0].strip()}") from None
        raise piece.error(f"does not parse as Python: {error.msg} (line {error.lineno})") from None


def unfinished(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Is there nothing in it but `...` or `pass`? (A class with a docstring may be.)"""
    body = node.body
    if ast.get_docstring(node) is not None:
        if isinstance(node, ast.ClassDef):
            return False
        body = body[1:]
    empty = (isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and ast.unparse(n) == "...") for n in body)
    return all(empty) and not node.decorator_list


# --- Assembling files -----------------------------------------------------------------------------


def assemble(pieces: list[Piece]) -> dict[str, File]:
    """Gather the cells by target, check what concerns several cells, and lay out each file."""
    targets: dict[str, list[Piece]] = {}
    errors: list[str] = []
    for piece in pieces:
        targets.setdefault(piece.target, []).append(piece)
    files: dict[str, File] = {}
    for target, parts in targets.items():
        try:
            check_owner(parts)
            check_module(parts)
            files[target] = File(render(target, parts), list(dict.fromkeys(p.notebook.name for p in parts)))
        except NotebookError as error:
            errors.append(str(error))
    if errors:
        raise NotebookError("\n".join(errors))
    return files


def check_owner(parts: list[Piece]) -> None:
    """A file belongs to the first notebook that exports it; a later one says --append."""
    owner = parts[0].notebook.name
    for piece in parts:
        foreign = piece.notebook.name != owner
        if foreign and not piece.append:
            kernel = "give the kernel another name" if not piece.target.endswith(".py") else "use --append"
            raise piece.error(f"{piece.target} is already exported by {owner}; {kernel}")
        if piece.append and not foreign:
            raise piece.error(f"no earlier notebook exports {piece.target}: leave out --append")


def check_module(parts: list[Piece]) -> None:
    """In one module: imports in the first cell only, each name defined once, one docstring."""
    if not parts[0].target.endswith(".py"):
        return
    where: dict[str, Piece] = {}
    for index, piece in enumerate(parts):
        tree = ast.parse(piece.code)
        if index and piece.doc is not None:
            raise piece.error(f"`#| doc` belongs to the first exported cell of {piece.target}")
        if index and imports_outside_functions(tree):
            first = f"{parts[0].notebook.name}, cell {parts[0].number}"
            raise piece.error(f"import in a later cell of {piece.target}: its imports belong into {first}")
        for node in tree.body:
            if isinstance(node, Definition) and not node.decorator_list:
                if node.name in where:
                    other = where[node.name]
                    seen = f"{other.notebook.name}, cell {other.number}"
                    raise piece.error(f"`{node.name}` is already defined in {piece.target} by {seen}")
                where[node.name] = piece


def imports_outside_functions(node: ast.AST) -> bool:
    """Does this code import when it is loaded?"""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return any(imports_outside_functions(child) for child in ast.iter_child_nodes(node))


def render(target: str, parts: list[Piece]) -> str:
    """The text of a generated file."""
    sources = ", ".join(dict.fromkeys(p.notebook.name for p in parts))
    origin = f"Generated from {sources}; edit there, then run: python tools/nb.py export"
    if not target.endswith(".py"):
        head = textwrap.fill(origin, WIDTH, initial_indent="// ", subsequent_indent="// ")
        return "\n\n".join([head, *(piece.code for piece in parts)]) + "\n"
    sentence = parts[0].doc or quote_of(parts[0])
    sentence = " " * sentence.startswith('"') + sentence
    head = ('r"""' if "\\" in sentence else '"""') + sentence
    wrapped = [textwrap.fill(p, WIDTH, break_long_words=False, break_on_hyphens=False) for p in (head, origin)]
    return join_code(["\n\n".join(wrapped) + '\n"""', *(piece.code for piece in parts)]) + "\n"


def quote_of(piece: Piece) -> str:
    """The notebook in one sentence: the first `> ` line of its prose."""
    for _, cell in piece.notebook.cells("markdown"):
        if (match := re.search(r"^> *(\S.*)$", source(cell), re.M)) and '"""' not in match[1]:
            return match[1].strip()
    raise piece.error(f"{piece.target} has no docstring: write a `> one sentence` line below the title, or `#| doc`")


def join_code(blocks: list[str]) -> str:
    """Two blank lines between cells; one, as ruff has it, between docstring or imports and a statement."""
    text, last = "", ""
    for block in blocks:
        tree = ast.parse(block)
        narrow = text == last or isinstance(ast.parse(last).body[-1], ast.Import | ast.ImportFrom)
        gap = "\n\n" if narrow and not isinstance(tree.body[0], Definition) else "\n\n\n"
        text, last = text + (gap if text else "") + block, block
    return text


# --- Files that lie there already -----------------------------------------------------------------


def is_generated(path: Path) -> bool:
    """Does the file say at its top that it was generated?"""
    return bool(GENERATED.search(path.read_text(encoding="utf-8")[:2000]))


def refuse_hand_written(root: Path, files: dict[str, File]) -> None:
    """Never write over a file that lacks the generated header."""
    lost = [name for name in files if (root / name).exists() and not is_generated(root / name)]
    if lost:
        text = "there is a file without the line `Generated from ...`: written by hand? Move it away"
        raise NotebookError("\n".join(f"{files[name].sources[0]}: exports {name}, but {text}" for name in lost))


def stale_files(root: Path, want: dict[Path, str]) -> list[Path]:
    """Generated files that no notebook exports any more."""
    files = [p for suffix in ("py", "cu", "cuh") for p in sorted((root / PACKAGE).rglob(f"*.{suffix}"))]
    return [path for path in files if path not in want and is_generated(path)]
