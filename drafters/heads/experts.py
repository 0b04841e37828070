"""Mixtures of experts, as the layers inside targets have them: a router, experts of which a row visits few, and shared
ones. Qwen's router is a softmax (arXiv 2505.09388), DeepSeek-V3's a sigmoid with groups (arXiv 2412.19437, 2.1.2).

R rows, D width, E experts, N experts a row visits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.config import ModelConfig
from specdec.models.llama import Mlp


@dataclass(frozen=True, slots=True)
class Routing:
    """`corrected`: the sigmoid router, which chooses by score plus bias, among the best `kept_groups` of `groups`."""

    num_experts: int
    visited: int
    normalise: bool
    corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    factor: float = 1.0


class Router(nn.Module):
    """Its weights are fp32, as norms are: `offset` tells the loader so."""

    offset = 0.0

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.num_experts, width))
        self.e_score_correction_bias = nn.Parameter(torch.empty(routing.num_experts)) if routing.corrected else None

    def forward(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Experts `[R, N]` and their weights `[R, N]`, fp32."""
        routing = self.routing
        logits_RE = F.linear(x_RD.float(), self.weight)
        if self.e_score_correction_bias is None:
            weights_RN, experts_RN = logits_RE.softmax(-1).topk(routing.visited, -1)
        else:
            scores_RE = logits_RE.sigmoid()
            grouped = (scores_RE + self.e_score_correction_bias).view(len(x_RD), routing.groups, -1)
            best = grouped.topk(2, -1).values.sum(-1).topk(routing.kept_groups, -1).indices
            kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x_RD.device).scatter_(1, best, True)
            chosen_by = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
            experts_RN = chosen_by.topk(routing.visited, -1).indices
            weights_RN = scores_RE.gather(1, experts_RN)
        if routing.normalise:
            weights_RN = weights_RN / weights_RN.sum(-1, keepdim=True)
        return experts_RN, weights_RN * routing.factor


class Mixture(nn.Module):
    """In a layer's place for `mlp`. Qwen's one shared expert has a gate, DeepSeek's shared ones are added as they are;
    widths of 0 stand for none."""

    def __init__(
        self, config: ModelConfig, routing: Routing, *, width: int, gated_width: int, shared_width: int
    ) -> None:
        super().__init__()

        def mlp(size: int) -> Mlp:
            return Mlp(replace(config, intermediate_size=size, mlp_bias=False))

        self.gate = Router(config.hidden_size, routing)
        self.experts = nn.ModuleList(mlp(width) for _ in range(routing.num_experts))
        self.shared_expert = mlp(gated_width) if gated_width else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if gated_width else None
        self.shared_experts = mlp(shared_width) if shared_width else None

    def forward(self, x_RD: Tensor) -> Tensor:
        experts_RN, weights_RN = self.gate(x_RD)
        out_RD = torch.zeros_like(x_RD)
        for expert in experts_RN.unique().tolist():
            rows, places = torch.where(experts_RN == expert)
            part = self.experts[expert](x_RD[rows]) * weights_RN[rows, places, None].to(x_RD.dtype)
            out_RD.index_add_(0, rows, part)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out_RD = out_RD + self.shared_expert(x_RD) * self.shared_expert_gate(x_RD).sigmoid()
        return out_RD if self.shared_experts is None else out_RD + self.shared_experts(x_RD)


def unfused(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Experts that a file keeps together, `gate_up_proj` `[E, 2 I, D]` and `down_proj` `[E, D, I]`, one by one."""
    for name, tensor in tensors:
        stem, _, part = name.rpartition("experts.")
        if part == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for half, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    yield f"{stem}experts.{expert}.{half}.weight", rows
        elif part == "down_proj":
            yield from ((f"{stem}experts.{expert}.down_proj.weight", rows) for expert, rows in enumerate(tensor))
        else:
            yield name, tensor
