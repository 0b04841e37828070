"""The arrows between the folders, read off the imports: kernels <- specdec <- {drafters, grammar} <- {server, evals}.

An import counts wherever it stands, in a function or for types only, unless a test says otherwise.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("drafters", "evals", "grammar", "kernels", "server")
# The composition root, the two faces in front of it, and the table of public names: these may look up.
MAY_LOOK_UP = re.compile(r"specdec(\.build|\.llm|\.cli(\..*)?)?")
# The part of the core that schedules and keeps books, and what it stands on.
KNOWS_NO_TORCH = ("errors", "protocols", "request", "tree", "sequence", "text", "blocks", "scheduler", "policy")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: its full name, and whether only a type checker, or only a call, imports it."""

    name: str
    typing: bool
    lazy: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its import name, each file once."""
    found = {}
    for folder in ("specdec", *FOLDERS):
        # rglob does not enter the symlinks inside specdec/.
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "specdec" else ("specdec", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(source: str) -> Iterator[Import]:
    """All imports in `source`. `from a import b` names `a.b` where that is a module of ours, else `a`."""

    def walk(node: ast.AST, typing: bool, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, typing, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import of {child.module} at line {child.lineno}"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(full if full in MODULES else str(child.module), typing, lazy)
            elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                yield from walk(ast.Module(child.body, []), True, lazy)
                yield from walk(ast.Module(child.orelse, []), typing, lazy)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, typing, lazy or function)

    return walk(ast.parse(source), False, False)


IMPORTS = {name: tuple(imports(path.read_text())) for name, path in MODULES.items()}


def layer(module: str) -> str:
    """The folder that a module of ours belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "specdec"


def offenders(sources: set[str], targets: set[str]) -> list[str]:
    """`module -> import` for every import from a layer in `sources` of a module of ours in a layer in `targets`."""
    return [
        f"{module} -> {found.name}"
        for module, all_found in IMPORTS.items()
        if layer(module) in sources and not MAY_LOOK_UP.fullmatch(module)
        for found in all_found
        if found.name.partition(".")[0] == "specdec" and layer(found.name) in targets
    ]


def test_the_reader_sees_every_kind_of_import() -> None:
    source = """
import a.b, c
if TYPE_CHECKING:
    from specdec.tree import DraftTree
else:
    import d
def f():
    from specdec import tree
    class K:
        import e
try:
    import g
except ImportError:
    pass
"""
    assert set(imports(source)) == {
        Import("a.b", False, False),
        Import("c", False, False),
        Import("specdec.tree", True, False),
        Import("d", False, False),
        Import("specdec.tree", False, True),
        Import("e", False, True),
        Import("g", False, False),
    }
    assert layer("specdec.grammar.spec") == "grammar"
    assert layer("specdec.tree") == layer("specdec") == "specdec"


def test_every_folder_is_read() -> None:
    assert {layer(name) for name in MODULES} == {"specdec", *FOLDERS}
    assert {f"specdec.{name}" for name in ("errors", "protocols", "request", "tree", "sequence")} <= MODULES.keys()


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ({"kernels"}, {"specdec", *FOLDERS} - {"kernels"}),
        ({"specdec"}, {"drafters", "grammar", "server", "evals"}),
        ({"drafters"}, {"grammar", "server", "evals"}),
        ({"grammar"}, {"drafters", "server", "evals"}),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_nothing_looks_up(sources: set[str], targets: set[str]) -> None:
    assert offenders(sources, targets) == []


def test_nobody_imports_a_bare_folder() -> None:
    sources = {name: path.read_text() for name, path in MODULES.items()}
    sources |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    bare = [
        f"{name} -> {found.name}"
        for name, source in sources.items()
        for found in imports(source)
        if found.name.partition(".")[0] in FOLDERS
    ]
    assert bare == []


def test_transformers_is_for_tests_only() -> None:
    users = [m for m, found in IMPORTS.items() if any(i.name.partition(".")[0] == "transformers" for i in found)]
    assert users == []


def test_no_circles() -> None:
    """What types alone import is left out: a protocol may name what it is spoken with."""
    graph = {
        module: {i.name for i in found if not i.typing and i.name in MODULES and i.name != module}
        for module, found in IMPORTS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other in a circle: " + " <- ".join(error.args[1]))


def test_the_books_are_kept_without_torch() -> None:
    """A fresh interpreter imports that part of the core, and torch is not there afterwards; nor does a function ask."""
    names = [f"specdec.{name}" for name in KNOWS_NO_TORCH if f"specdec.{name}" in MODULES]
    code = f"import sys, specdec, {', '.join(names)}; print(*({{'torch', 'triton', 'xgrammar'}} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
    imported = [(name, found.name) for name in names for found in IMPORTS[name] if not found.typing]
    assert [pair for pair in imported if pair[1].partition(".")[0] == "torch"] == []
