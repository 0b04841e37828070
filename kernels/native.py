"""C kernels for the CPU: compiled on first use with the machine's own compiler, kept by a hash of what went in.

Where there is no compiler, or it fails, the torch references do the work; the log says so once. Knows no model.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILE_SECONDS = 60


def compiler() -> str | None:
    """The C compiler: `$CC`, else cc, gcc or clang; None where there is none."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return next((found for name in names if (found := shutil.which(name))), None)


@cache
def library(source: str) -> ctypes.CDLL | None:
    """The shared library of `kernels/cpu/<source>.c`, or None where it cannot be had.

    torch must be imported first: the library then shares its OpenMP runtime, and its threads.
    """
    command = compiler()
    if command is None:
        logger.warning("no C compiler is found: %s runs in torch, slower", source)
        return None
    try:
        return ctypes.CDLL(str(_built(command, SOURCES / f"{source}.c")))
    except subprocess.CalledProcessError as error:
        logger.warning("%s cannot be compiled and runs in torch, slower: %s", source, error.stderr.strip()[-500:])
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s cannot be compiled and runs in torch, slower: %s", source, error)
    return None


def _built(command: str, source: Path) -> Path:
    """The path of the compiled source, compiled now unless it was before: by this compiler, for this processor."""
    version = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True
    )
    facts = [source.read_text(encoding="utf-8"), version.stdout, " ".join(FLAGS), platform.machine(), _processor()]
    name = hashlib.blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()
    path = _folder() / f"{source.stem}-{name}.so"
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            arguments = [command, *FLAGS, str(source), "-o", str(draft), "-lm"]
            subprocess.run(arguments, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


def _folder() -> Path:
    """Where libraries are kept: `$SPECDEC_HOME/native`, else the user's cache; a folder of this process where neither
    can be written."""
    home = os.environ.get("SPECDEC_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
    folder = base / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="specdec-native-"))
    return folder


def _processor() -> str:
    """What the compiler sees with -march=native: model and features, on Linux."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
