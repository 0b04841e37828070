"""The script that checks and times kernels on a GPU, rehearsed in the interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

ALL = [
    *("machine", "engine", "drafters", "steps", "noise", "mask", "penalties", "biases", "draw", "guesses"),
    *("fronts", "logprobs", "drawing", "norm", "rotary", "activation", "attention", "kv"),
]
# What the package needs besides torch, triton, numpy and safetensors.
OTHERS = (
    *("tokenizers", "jinja2", "llguidance", "jsonschema_rs", "fastapi", "uvicorn", "pydantic", "typer", "rich"),
    *("prometheus_client", "huggingface_hub", "gguf", "xgrammar", "outlines_core"),
)
SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "gpu_check"


def rehearse(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    """The script's end and the sections of its JSON, run in a folder that is not the repository."""
    command = [sys.executable, str(SCRIPT), "--rehearse", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    print(result.stdout, result.stderr)
    report = json.loads((folder / "gpu_check.json").read_text())
    assert report["rehearsal"] is True
    return result, report["sections"]


@pytest.mark.parametrize(
    "names",
    [
        ["machine", "mask"],
        ["machine", "attention", "kv"],
        pytest.param(ALL, marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_checks_and_times_every_kernel_and_ends_with_one_table(names: list[str], tmp_path: Path) -> None:
    result, sections = rehearse(tmp_path, *(names if names is not ALL else []))
    assert result.returncode == 0
    assert list(sections) == names
    lines = result.stdout.splitlines()
    assert lines[-len(names) :] == [f"{name}: passes, {sections[name]['checks']} checks" for name in names]
    head = next(place for place, line in enumerate(lines) if line.split() == ["kernel", "us", "floor", "us", "ratio"])
    times = [found for section in sections.values() for found in section["times"]]  # type: ignore[attr-defined]
    assert len(times) == len(lines) - len(names) - head - 1 >= 2
    for found, line in zip(times, lines[head + 1 :], strict=False):
        assert line.startswith(found["name"])
        assert found["seconds"] > 0
        assert found["num_bytes"] > 0


def test_a_section_that_fails_is_reported_and_hides_no_other(tmp_path: Path) -> None:
    result, sections = rehearse(tmp_path, "--seconds", "0.2", "mask", "draw")
    assert result.returncode == 1
    assert [section["checks"] for section in sections.values()] == [0, 0]
    assert "mask: fails, 0 checks" in result.stdout
    assert "draw: ran past 0.1 s" in result.stdout
    assert result.stdout.splitlines()[-1] == "draw: fails, 0 checks"


def test_a_section_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "masks"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert f"sections ['masks'] are unknown; there are {', '.join(ALL)}" in result.stderr


def test_all_that_the_script_imports_needs_no_other_package() -> None:
    modules = sorted(set(re.findall(r"from (specdec[\w.]*) import", SCRIPT.read_text(encoding="utf-8"))))
    assert "specdec.engine" in modules
    program = f"""
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {OTHERS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Only())
for module in {modules!r}:
    __import__(module)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
