"""Compiling every kernel and tuning ahead of time for GPUs that are not at hand, and what the compilers say of them.

`python -m specdec.kernels.gpu.targets` prints the table and fails where a kernel spills. It runs nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from specdec.kernels.gpu import guess, logprobs, mask, noise, sample
from specdec.kernels.gpu.tuning import Tuning

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel with one choice of its constants. `types` are the types of its arguments in order, constants left out;
    `aligned` says whether sizes and strides are multiples of 16, as pointers always are. `refused_by` are the targets
    that cannot do it, and say so with an error."""

    kernel: Any
    types: Sequence[str]
    constants: Mapping[str, int]
    warps: int
    aligned: bool = True
    refused_by: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Kernel, constants, warps, and whether sizes are odd."""
        constants = " ".join(f"{key.lower()} {value}" for key, value in self.constants.items())
        return f"{self.kernel.fn.__name__}: {constants}, {self.warps} warps{'' if self.aligned else ', odd sizes'}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a target's compiler made of a kernel. Sizes are bytes; what a vendor does not know is None."""

    name: str
    target: str
    registers: int | None = None
    shared: int | None = None
    spilled: int = 0
    scalar_spills: int | None = None
    refusal: str = ""
    faults: list[str] = field(default_factory=list)


def compilations() -> Iterator[Compilation]:
    """Every kernel with each of its tunings, sizes aligned; the first tuning with odd sizes too."""
    rows, draws = ("*fp32", "i32", "i32"), ("*fp32", "*i64", "*i64", "i32", "i32")
    filters = ("*fp32", "*i32", "*fp32", "*fp32")
    by_tuning: list[tuple[Any, Sequence[str], Sequence[Tuning]]] = [
        (noise.gumbel_kernel, ("*fp32", "*i64", "*i64", "i32"), noise.TUNINGS),
        (noise.gumbel_of_kernel, ("*fp32", "*i32", "i32"), noise.TUNINGS),
        (mask.mask_kernel, ("*fp32", "*i32", "*i1", "i32", "i32", "i32"), mask.TUNINGS),
        (sample.penalty_kernel, ("*fp32", *["*i32"] * 3, *["*fp32"] * 3, "i32"), sample.PENALTY_TUNINGS),
        (sample.add_kernel, ("*fp32", "*i32", "*fp32", "*i32", "i32"), sample.ADD_TUNINGS),
        (
            sample.filter_kernel,
            ("*fp32", "*i32", "*fp32", *filters, "i32"),
            sample.FILTER_TUNINGS,
        ),
        (sample.scale_kernel, ("*fp32", "*fp32", *filters, "i32", "i32"), sample.DRAW_TUNINGS),
        (sample.draw_kernel, ("*i64", "*fp32", "*fp32", "*i32", *draws), sample.DRAW_TUNINGS),
        (logprobs.chunk_total_kernel, ("*fp32", "*fp32", *rows), logprobs.TOTAL_TUNINGS),
        (logprobs.chunk_top_kernel, ("*i64", *rows, "i32"), logprobs.TOP_TUNINGS),
    ]
    for kernel, types, tunings in by_tuning:
        for tuning in tunings:
            yield Compilation(kernel, types, {"BLOCK": tuning.block}, tuning.warps)
        yield Compilation(kernel, types, {"BLOCK": tunings[0].block}, tunings[0].warps, aligned=False)
    # As many chunks as 262,144 tokens have, and the likeliest 5 or 20 of each.
    joins: list[tuple[Any, Sequence[str], str, int, int]] = [
        (sample.choose_kernel, ("*i64", "*i64", "*fp32", "i32"), "CHUNKS", 256, sample.CHOOSE_WARPS),
        (logprobs.total_kernel, ("*fp32", "*fp32", "*fp32", "i32"), "CHUNKS", 64, logprobs.JOIN_WARPS),
        (logprobs.top_kernel, ("*i64", "*fp32", "*i64", "*fp32", "i32", "i32"), "SIZE", 1024, logprobs.JOIN_WARPS),
        (logprobs.top_kernel, ("*i64", "*fp32", "*i64", "*fp32", "i32", "i32"), "SIZE", 4096, logprobs.JOIN_WARPS),
    ]
    for kernel, types, constant, size, warps in joins:
        yield Compilation(kernel, types, {constant: size}, warps, aligned=False)
    yield from guesses()


def guesses() -> Iterator[Compilation]:
    """A drafter's guesses; 8 of each of as many chunks as 32,768 and 262,144 tokens have."""
    types = ("*i64", "*fp32", "*fp32", "*fp32", "*fp32", "*i32", "*fp32", "*i64", "*i64", "i32", "i32", "i32")
    for tuning in guess.TUNINGS:
        yield Compilation(guess.chunk_guess_kernel, types, {"BLOCK": tuning.block}, tuning.warps)
    first = guess.TUNINGS[0]
    yield Compilation(guess.chunk_guess_kernel, types, {"BLOCK": first.block}, first.warps, aligned=False)
    joined = ("*i32", "*fp32", "*i64", "*fp32", "*fp32", "*fp32", "i32", "i32")
    for chunks in (16, 128):
        sizes = {"SIZE": 8 * chunks, "CHUNKS": chunks}
        yield Compilation(guess.guess_kernel, joined, sizes, guess.JOIN_WARPS, aligned=False)


def report(compilation: Compilation, target_name: str) -> Report:
    """Compile for one of `TARGETS` and read registers, shared memory and spills; nothing is run."""
    target, kernel = TARGETS[target_name], compilation.kernel
    variable = [name for name in kernel.arg_names if name not in compilation.constants]
    types = dict(zip(variable, compilation.types, strict=True))
    divisible = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        dict(compilation.constants),
        {
            (place,): divisible
            for place, name in enumerate(kernel.arg_names)
            if name in types and (compilation.aligned or types[name].startswith("*"))
        },
    )
    options = {"num_warps": compilation.warps, "enable_fp_fusion": False}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except (CompilationError, ValueError) as error:
        refusal = str(error).strip().splitlines()[-1]
        faults = [] if target_name in compilation.refused_by else [f"is refused: {refusal}"]
        return Report(compilation.name, target_name, refusal=refusal, faults=faults)
    if target.backend == "hip":
        found = from_assembly(compilation.name, target_name, compiled.asm["amdgcn"], compiled.metadata.shared)
    else:
        found = from_ptxas(compilation.name, target_name, compiled.asm["ptx"], compiled.metadata.shared)
    if target_name in compilation.refused_by:
        found.faults.append("compiles where it should be refused")
    return found


def from_ptxas(name: str, target_name: str, ptx: str, shared: int) -> Report:
    """Ask the `ptxas` that Triton itself uses for the target."""
    capability = TARGETS[target_name].arch
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, "-v", "--fmad=false", f"--gpu-name={arch}", str(path)]
        said = subprocess.run([*command, "-o", f"{path}.cubin"], capture_output=True, text=True, check=True).stderr
    stores, loads = number(r"(\d+) bytes spill stores", said), number(r"(\d+) bytes spill loads", said)
    spilled = stores + loads
    faults = [f"spills {stores} bytes and loads {loads}"] if spilled else []
    return Report(name, target_name, number(r"Used (\d+) registers", said), shared, spilled, faults=faults)


def from_assembly(name: str, target_name: str, assembly: str, shared: int) -> Report:
    """Read the metadata at the end of AMD's assembly."""
    vectors = number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    private = number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    faults = [f"spills {vectors} vector registers"] if vectors else []
    if private:
        faults.append(f"has a private segment of {private} bytes")
    return Report(
        name,
        target_name,
        number(r"\.vgpr_count:\s*(\d+)", assembly),
        shared,
        private,
        number(r"\.sgpr_spill_count:\s*(\d+)", assembly),
        faults=faults,
    )


def number(pattern: str, text: str) -> int:
    """The one number that `pattern` finds. Raises ValueError where there is none: the compiler speaks differently."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} is not in what the compiler says: {text[-500:]!r}")
    return int(found[1])


def table(reports: Sequence[Report]) -> str:
    """One line a kernel and target; `-` where a vendor has no such number."""
    lines = [f"{'kernel':62} {'target':7} {'registers':>9} {'shared':>7} {'spilled':>7} {'sgpr spills':>11}"]
    for found in reports:
        head = f"{found.name:62} {found.target:7} "
        if found.refusal:
            lines.append(f"{head}refused: {found.refusal}")
            continue
        scalars = "-" if found.scalar_spills is None else found.scalar_spills
        lines.append(f"{head}{found.registers:>9} {found.shared:>7} {found.spilled:>7} {scalars:>11}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for the targets named (default: all) and return 1 where there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    names = parser.parse_args(arguments).targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"targets {sorted(unknown)} are unknown; there are {', '.join(TARGETS)}")
    reports = [report(compilation, name) for compilation in compilations() for name in names]
    faults = [f"{found.name} on {found.target} {fault}" for found in reports for fault in found.faults]
    lines = [f"triton {triton.__version__}", table(reports), *faults]
    sys.stdout.write("\n".join([*lines, f"{len(reports)} compilations, {len(faults)} faults\n"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
