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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from specdec.kernels.gpu import activation, attention, front, guess, kv, logprobs, mask, noise, norm, rotary, sample
from specdec.kernels.gpu.tuning import Tuning, fitting_warps

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that a program may take.
SHARED: Mapping[str, int] = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel with one choice of its constants. `types` are the types of its arguments in order, constants left out;
    `aligned` says whether sizes and strides are multiples of 16, as pointers always are. `refused_by` are the targets
    that cannot do it, and say so with an error, `targets` those that it is for; `shape` are the constants in words,
    where there are many."""

    kernel: Any
    types: Sequence[str]
    constants: Mapping[str, Any]
    warps: int
    aligned: bool = True
    refused_by: frozenset[str] = frozenset()
    stages: int | None = None
    fused: bool = False
    shape: str = ""
    targets: frozenset[str] = frozenset(TARGETS)

    @property
    def name(self) -> str:
        """Kernel, constants, warps, and whether sizes are odd."""
        constants = self.shape or " ".join(f"{key.lower()} {value}" for key, value in self.constants.items())
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
        (sample.add_kernel, ("*fp32", "*i32", "*fp32", "*i32", "*i32", "i32"), sample.ADD_TUNINGS),
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
    yield from fronts()
    yield from layers()
    yield from attention_compilations()


def fronts() -> Iterator[Compilation]:
    """Trees of 8 and of 32 guesses behind a row, 8 rows a level, and as many levels as draft depths are at most."""
    ints, floats = "*i64", "*fp64"
    grown = (*[ints] * 7, floats, ints, floats, "*i1", *[ints] * 2, *[ints] * 5, *[ints] * 1, *["i32"] * 7)
    for size in (512, 4096):
        yield Compilation(front.front_kernel, grown, {"SIZE": size}, front.num_warps(size), aligned=False)
    hung = (ints, floats, "*i1", ints, ints, "*i32", ints, floats, ints, ints, "*i32", "*fp32")
    for branch, ranked in ((8, False), (8, True), (32, False)):
        types = (*hung, floats if ranked else ints, ints, ints, floats, *["i32"] * 4)
        constants = {"BRANCH": branch, "TEMPERS": 8, "RANKED": ranked}
        yield Compilation(front.hang_kernel, types, constants, front.HANG_WARPS, aligned=False)


def layers() -> Iterator[Compilation]:
    """What surrounds the linears of a layer: bf16, and one of each in fp16 or fp32; norms of 4,096, of heads of 128,
    and of the widest rows."""
    three, two = ["i32"] * 3, ["i32"] * 2

    def normed(dtype: str, width: int, tuning: Tuning, aligned: bool = True) -> Iterator[Compilation]:
        rows, whole, options = norm.cut(width, tuning)
        constants, warps = {"ROWS": rows, "WIDTH": whole}, int(options["num_warps"])
        stream, weights = [f"*{dtype}"] * 4, ["*fp32", "*fp32"]
        for kernel, types in (
            (norm.norm_kernel, (*stream[:2], *weights, *three, *three)),
            (norm.add_norm_kernel, (*stream, *weights, *two, *two)),
            (norm.add_normed_norm_kernel, (*stream, *weights, *weights, *two, *two)),
        ):
            if width > 128 or kernel is norm.norm_kernel:
                yield Compilation(kernel, types, constants, warps, aligned)

    for tuning in norm.TUNINGS:
        yield from normed("bf16", 4096, tuning)
        yield from normed("bf16", 128, tuning)
    yield from normed("fp16", 2560, norm.TUNINGS[0], aligned=False)
    yield from normed("fp32", norm.WIDEST, norm.TUNINGS[0])
    wide = ("*bf16", "*bf16", "*fp32", "*fp32", *two, *three)
    yield Compilation(norm.wide_norm_kernel, wide, {"WIDTH": norm.WIDE.block}, norm.WIDE.warps)

    def turned(dtype: str, tuning: Tuning, half: int, size: int, aligned: bool = True) -> Compilation:
        whole = triton.next_power_of_2(size)
        constants = {
            "HEADS": max(1, tuning.block // whole),
            "HALF": half,
            "REST": triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0,
            "SIZE": whole,
        }
        table = ["*fp32", "*fp32"] if half else ["*i64", "*i64"]
        types = (*[f"*{dtype}"] * 5, *table, "*i64", *["i32"] * 14)
        return Compilation(rotary.rotate_kernel, types, constants, tuning.warps, aligned)

    for tuning in rotary.WRITE_TUNINGS:
        yield turned("bf16", tuning, 64, 128)
    yield turned("fp16", rotary.WRITE_TUNINGS[0], 32, 128)
    yield turned("bf16", rotary.WRITE_TUNINGS[0], 0, 128)
    yield turned("fp32", rotary.WRITE_TUNINGS[0], 128, 256, aligned=False)

    plain: list[tuple[Any, Sequence[str], Sequence[Tuning]]] = [
        (rotary.table_kernel, ("*fp32", "*fp32", "*i64", "*fp32", "i32", "i32"), rotary.TABLE_TUNINGS),
        (activation.swiglu_kernel, ("*bf16", "*bf16", *two), activation.TUNINGS),
        (activation.geglu_kernel, ("*bf16", "*bf16", *two), activation.TUNINGS),
    ]
    for kernel, types, tunings in plain:
        for tuning in tunings:
            yield Compilation(kernel, types, {"BLOCK": tuning.block}, tuning.warps)
    odd = activation.TUNINGS[0]
    yield Compilation(activation.geglu_kernel, ("*fp32", "*fp32", *two), {"BLOCK": odd.block}, odd.warps, aligned=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """What attention is compiled for: see `attention.attend_kernel`."""

    dtype: str
    head_size: int
    group: int
    queries: int
    squeezed: bool = False


# Every tuning, and every dtype, group size and head size with small tiles and with large ones.
LAYERS = (
    *(Layer("bf16", size, group, 16) for size, group in ((64, 1), (128, 4), (256, 8))),
    *(Layer("bf16", size, group, 32, True) for size, group in ((128, 1), (256, 4))),
    *(Layer("bf16", size, group, 64) for size, group in ((64, 4), (256, 1))),
    *(Layer("bf16", size, group, 128) for size, group in ((64, 1), (128, 8))),
    *(Layer("fp16", size, group, queries, True) for size, group, queries in ((64, 8, 16), (128, 4, 128), (256, 8, 64))),
    *(Layer("fp32", size, group, 32, True) for size, group in ((64, 1), (128, 8), (256, 4))),
)


def attention_compilations() -> Iterator[Compilation]:
    """Attention of all `LAYERS`, and moving of their keys and values."""
    scalars = ("i32", "i32", "i32", "i32", "i32", "fp32", "fp32")
    for layer in LAYERS:
        kind, size = f"*{layer.dtype}", triton.next_power_of_2(layer.head_size)
        by_target: dict[attention.Tuning, set[str]] = {}
        for target in TARGETS:
            element_size = 4 if layer.dtype == "fp32" else 2
            for tuning in attention.tunings(
                layer.queries, layer.head_size, element_size, target in ("sm_80", "gfx942")
            ):
                by_target.setdefault(tuning, set()).add(target)
        for tuning, targets in by_target.items():
            yield Compilation(
                attention.attend_kernel,
                (kind, *["*fp32"] * 3, *[kind] * 3, "*i32", "*i64", "*i64", "*fp32", "*i32", *scalars),
                {
                    "GROUP": layer.group,
                    "HEAD_SIZE": layer.head_size,
                    "BLOCK_SIZE": 16,
                    "QUERIES": layer.queries,
                    "SLOTS": tuning.slots,
                    "EDGE": tuning.edge,
                    "SIZE": size,
                    "DIMS": min(size, tuning.dims or size),
                    "DOT": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[layer.dtype],
                    "SOFTCAPPED": layer.squeezed,
                    "SINKS": layer.squeezed,
                },
                tuning.warps,
                stages=tuning.stages,
                fused=True,
                shape=f"{layer.dtype} {layer.head_size} by {layer.group}, {layer.queries} x {tuning.slots}"
                f"{', squeezed' if layer.squeezed else ''}, {tuning.stages} stages",
                targets=frozenset(targets),
            )
    for head_size in (64, 128, 256):
        yield Compilation(
            attention.join_kernel,
            ("*bf16", *["*fp32"] * 4, "*i32", "i32"),
            {"CHUNKS": attention.JOIN_CHUNKS, "SIZE": head_size, "SINKS": head_size == 128},
            attention.JOIN_WARPS,
            fused=True,
        )
        sizes = kv.sizes(8, head_size)
        for back in (False, True):
            types = ("*bf16", "*bf16", "*i64", *["i32"] * 4)
            yield Compilation(kv.stage_kernel, types, {"BACK": back, **sizes}, kv.WARPS)


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
            if name in types and types[name] != "fp32" and (compilation.aligned or types[name].startswith("*"))
        },
    )
    options = {
        "num_warps": fitting_warps(compilation.warps, target.warp_size),
        "enable_fp_fusion": compilation.fused,
    }
    if compilation.stages is not None:
        options["num_stages"] = compilation.stages
    try:
        compiled = triton.compile(source, target=target, options=options)
    except (CompilationError, ValueError) as error:
        refusal = str(error).strip().splitlines()[-1]
        faults = [] if target_name in compilation.refused_by else [f"is refused: {refusal}"]
        return Report(compilation.name, target_name, refusal=refusal, faults=faults)
    if target.backend == "hip":
        found = from_assembly(compilation.name, target_name, compiled.asm["amdgcn"], compiled.metadata.shared)
    else:
        found = from_ptxas(
            compilation.name, target_name, compiled.asm["ptx"], compiled.metadata.shared, compilation.fused
        )
    if target_name in compilation.refused_by:
        found.faults.append("compiles where it should be refused")
    if found.shared is not None and found.shared > SHARED[target_name]:
        found.faults.append(f"takes {found.shared} bytes of shared memory, {SHARED[target_name]} are there")
    return found


def from_ptxas(name: str, target_name: str, ptx: str, shared: int, fused: bool) -> Report:
    """Ask the `ptxas` that Triton itself uses for the target."""
    capability = TARGETS[target_name].arch
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        fusing = [] if fused else ["--fmad=false"]
        command = [get_ptxas(capability).path, "-v", *fusing, f"--gpu-name={arch}", str(path)]
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


def _report_of(place: int, target_name: str) -> Report:
    """`report` of one of `compilations`, by its place: kernels do not cross from process to process."""
    return report(next(islice(compilations(), place, None)), target_name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for the targets named (default: all) and return 1 where there are faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    names = parser.parse_args(arguments).targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"targets {sorted(unknown)} are unknown; there are {', '.join(TARGETS)}")
    asked = [
        (place, name)
        for place, compilation in enumerate(compilations())
        for name in names
        if name in compilation.targets
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        reports = list(processes.map(_report_of, *zip(*asked, strict=True), chunksize=4))
    faults = [f"{found.name} on {found.target} {fault}" for found in reports for fault in found.faults]
    lines = [f"triton {triton.__version__}", table(reports), *faults]
    sys.stdout.write("\n".join([*lines, f"{len(reports)} compilations, {len(faults)} faults\n"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
