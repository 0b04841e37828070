"""The Python of README.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))


def test_every_block_of_python_is_run() -> None:
    assert README.read_text(encoding="utf-8").count("```python") == len(BLOCKS) > 0


@pytest.mark.weights
def test_the_python_face(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS["python"], "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "Paris" in lines[0]
    assert re.fullmatch(r" (Mon|Tues|Wednes)day", lines[-1])
