"""What is installed: the wheel holds the tree's files once each, and the package opens without its heavy parts."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import specdec

ROOT = Path(__file__).parent.parent
FOLDERS = ("drafters", "evals", "grammar", "kernels", "server")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | environment
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files in the wheel, built from a copy of the tree so that nothing is left behind in it."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("specdec", *FOLDERS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_file_of_the_tree_once(wheel: list[str]) -> None:
    expected = set()
    for folder in ("specdec", *FOLDERS):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                inside = path.relative_to(ROOT)
                expected.add(str(inside if folder == "specdec" else Path("specdec", inside)))
    packed = [name for name in wheel if ".dist-info/" not in name]
    assert len(packed) == len(set(packed))
    assert set(packed) == expected
    assert "specdec/py.typed" in packed


def test_the_wheel_carries_the_licence_and_the_command(wheel: list[str]) -> None:
    kept = {name.partition(".dist-info/")[2] for name in wheel if ".dist-info/" in name}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= kept


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_reached_through_a_relative_link(folder: str) -> None:
    link = ROOT / "specdec" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert (ROOT / folder / "__init__.py").is_file()


def test_every_package_directory_has_an_init() -> None:
    bare = {
        str(path.parent.relative_to(ROOT))
        for folder in ("specdec", *FOLDERS)
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    }
    assert bare == set()


def test_importing_specdec_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'xgrammar', 'triton', 'fastapi', 'specdec.request'}"
    assert run_python(f"import sys, specdec; print(*sorted({heavy} & sys.modules.keys()))") == ""


@pytest.mark.parametrize(("given", "seen"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_spin_briefly_unless_told_otherwise(given: dict[str, str], seen: str) -> None:
    assert run_python("import specdec, os; print(os.environ['GOMP_SPINCOUNT'])", **given) == seen


@pytest.mark.parametrize("name", specdec.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(specdec, name).__class__ is not None
    assert name in dir(specdec)


def test_types_and_names_agree() -> None:
    """What a type checker sees of the package is what it gives at run time."""
    tree = ast.parse((ROOT / "specdec" / "__init__.py").read_text())
    typed = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(specdec._HOME_OF.items())
    assert {name for name, _ in typed} == set(specdec.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        getattr(specdec, "Nonsense")  # noqa: B009 - a type checker knows better


def test_the_lock_holds_one_exact_version_of_everything_asked_for() -> None:
    lines = [
        line for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    pins: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        assert not re.search(r"[+*]", pin.version), f"{line}: a local or open version is not found everywhere"
        assert canonicalize_name(requirement.name) not in pins, f"{line}: pinned twice"
        pins[canonicalize_name(requirement.name)] = pin.version
    asked = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
    outside = [str(want) for want in asked if not want.specifier.contains(pins.get(canonicalize_name(want.name), "0"))]
    assert outside == []
    assert pins["torch"] == "2.13.0"
