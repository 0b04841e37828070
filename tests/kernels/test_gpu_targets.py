"""Kernels compiled for GPUs that are not at hand: what the compilers say of them, and what is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

from specdec.kernels import gpu
from specdec.kernels.gpu.targets import TARGETS, Report, compilations, from_assembly, number, table
from specdec.kernels.gpu.tuning import fitting_warps

ROOT = Path(__file__).parent.parent.parent
# Run where kernels are compiled, not interpreted: one that spills on purpose, and one that only some targets can do.
PROBE = """
import sys
import triton, triton.language as tl
from specdec.kernels.gpu.targets import Compilation, report

@triton.jit
def greedy_kernel(out, rows, BLOCK: tl.constexpr):
    x = tl.load(rows + tl.arange(0, BLOCK))
    tl.store(out + tl.arange(0, BLOCK), x - tl.max(x, 0))

@triton.jit
def narrow_kernel(out, rows, BLOCK: tl.constexpr):
    x = tl.load(rows + tl.arange(0, BLOCK)).to(tl.float8e4nv)
    tl.store(out + tl.arange(0, BLOCK), x.to(tl.float32))

found = report(Compilation(greedy_kernel, ("*fp32", "*fp32"), {"BLOCK": 16384}, 1), "sm_90")
print("spills", found.target, found.spilled > 0, found.faults)
for refused_by in (frozenset(), frozenset({"sm_80"})):
    for target in ("sm_80", "sm_90"):
        found = report(Compilation(narrow_kernel, ("*fp32", "*fp32"), {"BLOCK": 128}, 4, True, refused_by), target)
        print("refuses", found.target, bool(found.refusal), found.faults)
found = report(Compilation(narrow_kernel, ("*fp32", "*fp32"), {"BLOCK": 128}, 4, True, frozenset({"sm_90"})), "sm_90")
print("refuses", found.target, bool(found.refusal), found.faults)
"""


def compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1_100)


@pytest.mark.slow  # CI compiles them all before it tests: scripts/kernel_table
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("targets", [["gfx942"], [name for name in TARGETS if name != "gfx942"]])
def test_every_kernel_and_tuning_compiles_without_spills(targets: list[str]) -> None:
    result = compiling("-m", "specdec.kernels.gpu.targets", *targets)
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    found = list(compilations())
    assert f"{sum(len(each.targets & {*targets}) for each in found)} compilations, 0 faults" in result.stdout
    for compilation in found:
        assert result.stdout.count(f"{compilation.name:62} ") == len(compilation.targets & {*targets})


def test_every_kernel_is_compiled() -> None:
    """Whatever a launcher starts by `name_kernel[grid](...)` is among the compilations."""
    launched = set()
    for path in Path(gpu.__file__).parent.glob("*.py"):
        launched |= {line.split("[(")[0].strip() for line in path.read_text().splitlines() if "_kernel[(" in line}
    assert launched == {compilation.kernel.fn.__name__ for compilation in compilations()}
    assert len({compilation.name for compilation in compilations()}) == len(list(compilations()))


@pytest.mark.slow
def test_spills_and_refusals_are_faults_unless_a_refusal_is_expected(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    result = compiling(str(probe))
    print(result.stderr)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("spills sm_90 True ['spills ")
    assert lines[1].startswith("refuses sm_80 True [")
    assert "is refused: type fp8e4nv not supported in this architecture" in lines[1]
    assert lines[2:] == [
        "refuses sm_90 False []",
        "refuses sm_80 True []",
        "refuses sm_90 False []",
        "refuses sm_90 False ['compiles where it should be refused']",
    ]


def test_a_program_asks_for_no_more_threads_than_a_target_gives() -> None:
    assert [fitting_warps(warps, 32) for warps in (1, 16, 32, 64)] == [1, 16, 32, 32]
    assert [fitting_warps(warps, 64) for warps in (1, 16, 32, 64)] == [1, 16, 16, 16]


def test_an_unknown_target_is_refused_by_name() -> None:
    result = compiling("-m", "specdec.kernels.gpu.targets", "sm_10")
    assert result.returncode == 2
    assert "targets ['sm_10'] are unknown; there are sm_80, sm_90, sm_100, gfx942" in result.stderr


ASSEMBLY = """
    .private_segment_fixed_size: {private}
    .sgpr_count:     32
    .sgpr_spill_count: 7
    .vgpr_count:     20
    .vgpr_spill_count: {vectors}
"""


@pytest.mark.parametrize(
    "private, vectors, faults",
    [
        (0, 0, []),
        (16, 0, ["has a private segment of 16 bytes"]),
        (8, 2, ["spills 2 vector registers", "has a private segment of 8 bytes"]),
    ],
)
def test_spills_are_read_off_the_assembly(private: int, vectors: int, faults: list[str]) -> None:
    found = from_assembly("k", "gfx942", ASSEMBLY.format(private=private, vectors=vectors), 4096)
    assert found == Report("k", "gfx942", 20, 4096, private, 7, faults=faults)
    with pytest.raises(ValueError, match="is not in what the compiler says: 'nothing'"):
        number(r"(\d+) registers", "nothing")


def test_the_table_has_a_line_for_each_and_says_what_is_refused() -> None:
    lines = table([Report("k", "gfx942", 20, 4096, 0, 7), Report("k", "sm_80", refusal="no e4m3 here")]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["k", "gfx942", "20", "4096", "0", "7"],
        ["k", "sm_80", "refused:", "no", "e4m3", "here"],
    ]
