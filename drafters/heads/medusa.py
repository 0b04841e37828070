"""Medusa (Cai et al., arXiv 2401.10774): heads beside the target's own that guess the tokens after the next one, each
from the same hidden state. No attention, no recurrence.

L logits rows, D target width, W vocabulary of the heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.drafters.heads import Target
from specdec.drafters.heads.body import checked_ids
from specdec.drafters.heads.conventions import overridden
from specdec.drafters.heads.files import Files, Stored
from specdec.errors import ModelError
from specdec.kernels.head import wide_logits
from specdec.loader import fill

# How old files of vLLM spell block l and matrix of head i.
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_MATRIX = re.compile(r"lm_heads\.(\d+)\.weight")
_INSIDE = "medusa_head."


@dataclass(frozen=True, slots=True)
class MedusaConvention:
    """`features`: the target's last hidden state "before_norm" or "after_norm"."""

    features: Literal["before_norm", "after_norm"] = "after_norm"


class Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x_LD: Tensor) -> Tensor:
        return x_LD + F.silu(self.linear(x_LD))


class Medusa(nn.Module):
    """Head i of `num_heads` (from 0) guesses the token i + 2 places after the one whose hidden state it reads, as the
    target's own head tells the next. `targets` are the target's ids of the heads' ids, `[W]`, or None."""

    def __init__(
        self,
        heads: nn.ModuleList,
        target: Target,
        *,
        has_matrices: bool,
        taps: tuple[int, ...],
        targets: Tensor | None,
    ) -> None:
        super().__init__()
        self.name, self.taps, self.targets, self.num_heads = "medusa", taps, targets, len(heads)
        self.heads, self.target, self.has_matrices = heads, target, has_matrices

    def logits(self, features_LD: Tensor, head: int) -> Tensor:
        """fp32 `[L, W]`, from the target's hidden states of the tap."""
        chain = cast(nn.Sequential, self.heads[head])
        if not self.has_matrices:
            return self.target.head(chain(features_LD))
        *blocks, matrix = chain
        for block in blocks:
            features_LD = block(features_LD)
        return wide_logits(matrix, features_LD)


def open_medusa(
    files: Files, target: Target, overrides: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> Medusa:
    """See `open_head`. Heads are counted by the tensors: published configs are wrong about them."""
    convention = overridden(MedusaConvention(), overrides, "medusa")
    files, token_map = _heads_only(files)
    ids = None if token_map is None else checked_ids(token_map, target.vocab_size, f"{files.folder}: token_map")
    blocks = {tuple(name.split(".")[:2]) for name in files.tensors if "linear" in name}
    num_heads = len({head for head, _ in blocks})
    if not num_heads:
        raise ModelError(f"{files.folder}: no Medusa head is in these tensors: {', '.join(sorted(files.tensors)[:4])}")
    depth = len({block for _, block in blocks})
    D, W = target.hidden_size, target.vocab_size if ids is None else len(ids)
    has_matrices, bias = f"0.{depth}.weight" in files.tensors, "0.0.linear.bias" in files.tensors
    if ids is not None and not has_matrices:
        raise ModelError(f"{files.folder}: token_map without head matrices of its own; the target's head has every id")
    with torch.device("meta"):
        matrices = [nn.Linear(D, W, bias=False) for _ in range(num_heads)] if has_matrices else []
        chains = ([Block(D, bias=bias) for _ in range(depth)] for _ in range(num_heads))
        heads = nn.ModuleList(nn.Sequential(*chain, *matrices[head : head + 1]) for head, chain in enumerate(chains))
    fill(heads, files.read(list(files.tensors)), files.folder, device=device, dtype=dtype)
    taps = (target.num_layers + (convention.features == "after_norm"),)
    targets = None if ids is None else ids.to(device)
    return Medusa(heads, target, has_matrices=has_matrices, taps=taps, targets=targets).eval()


def _heads_only(files: Files) -> tuple[Files, Tensor | None]:
    """The heads' tensors in the authors' spelling, without those of the target around them, and the token_map."""
    prefix = _INSIDE if any(name.startswith(_INSIDE) for name in files.tensors) else ""
    tensors: dict[str, Stored] = {}
    matrices: dict[str, Stored] = {}
    token_map = None
    for full_name, stored in files.tensors.items():
        name = full_name.removeprefix(prefix)
        if not full_name.startswith(prefix) or name == "lm_head.weight":  # the target's, or a copy of it
            continue
        if name == "token_map":
            token_map = next(tensor for _, tensor in files.read([full_name]))
        elif match := _BLOCK.fullmatch(name):
            head, block, part = match.groups()
            tensors[f"{head}.{block}.linear.{part}"] = stored
        elif match := _MATRIX.fullmatch(name):
            matrices[match[1]] = stored
        else:
            tensors[name] = stored
    depth = len({name.split(".")[1] for name in tensors if "linear" in name})
    return replace(files, tensors=tensors | {f"{head}.{depth}.weight": x for head, x in matrices.items()}), token_map
