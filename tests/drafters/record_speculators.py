"""Writes `recorded/`: tiny random heads saved by the `speculators` library, with the logits that it computes.

A script for people, run where that library is; the tests read only what it wrote:

    pip install --target SITE --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv
    PYTHONPATH=.:SITE TORCHDYNAMO_DISABLE=1 python tests/drafters/record_speculators.py
"""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from torch import Tensor

RECORDED = Path(__file__).parent / "recorded"
ROWS, STEPS, VOCABULARY, WIDTH, TARGET_LAYERS = 9, 3, 40, 16, 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
# Name of the case: the body, changes of its config, changes of the head's config.
EAGLE3: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle3-llama": ("llama", {}, {}),
    "eagle3-llama-residual-d2t": ("llama", {}, {"norm_before_residual": True, "draft_vocab_size": 24}),
    "eagle3-llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}, {}),
    "eagle3-llama-norm-output": ("llama", {"num_hidden_layers": 2}, {"norm_output": True, "fc_norm": True}),
    "eagle3-qwen3": ("qwen3", {}, {"draft_vocab_size": 24}),
    "eagle3-qwen3-before-fc": ("qwen3", {"head_dim": 12}, {"norm_before_fc": True, "norm_before_residual": True}),
    "eagle3-qwen3-five": (
        "qwen3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4,
         "use_sliding_window": True},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 6, 8], "fc_norm": True},
    ),
}  # fmt: skip

MTP: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp-qwen3": ("qwen3", {"num_hidden_layers": TARGET_LAYERS}),
    "mtp-qwen3-next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
            "norm_topk_prob": True,
        },
    ),
}

PEAGLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "peagle-llama": ("llama", {"num_hidden_layers": 2}, {"draft_vocab_size": 24, "norm_before_residual": True}),
    "peagle-qwen3": ("qwen3", {"num_hidden_layers": 2}, {"norm_before_fc": True}),
}


def stub(names: list[str]) -> None:
    """Stand-ins for what the library imports and these models never call."""
    for name in names:
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module


def body(kind: str, **changes: Any) -> Any:
    import transformers

    numbers = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "attn_implementation": "eager",
    }
    make = {
        "llama": transformers.LlamaConfig,
        "qwen3": transformers.Qwen3Config,
        "qwen3_next": transformers.Qwen3NextConfig,
    }[kind]
    return make(**(numbers | changes))


def speculators_config(algorithm: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def randomise(model: Any, generator: torch.Generator) -> None:
    """Every weight random and of a size that matters, norms and biases too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def offsets(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` target ids as d2t (offsets) and t2d (a flag a target id)."""
    ids = torch.randperm(VOCABULARY, generator=generator)[:size].sort().values
    flags = torch.zeros(VOCABULARY, dtype=torch.bool)
    flags[ids] = True
    return ids - torch.arange(size), flags


def logits_of(model: Any, run: Callable[[], object]) -> list[Tensor]:
    """What the model's lm_head gives in each of its calls while `run` runs, `[rows, V]` each."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out[0].detach().clone()))
    with torch.no_grad():
        run()
    hook.remove()
    return seen


def record(name: str, model: Any, tensors: dict[str, Tensor]) -> None:
    folder = RECORDED / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "expected.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
        if file.suffix == ".py":  # the library's own code, which it saves along
            file.unlink()
    print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


def eagle3(name: str, kind: str, changes: dict[str, Any], changed_flags: dict[str, Any]) -> None:
    """Features of the target and the tokens after them in; logits of three teacher-forced steps out."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    generator = torch.Generator().manual_seed(sum(name.encode()))
    flags: dict[str, Any] = {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    flags |= changed_flags
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=body(kind, **changes), speculators_config=speculators_config("eagle3"), **flags
    )
    model = Eagle3DraftModel(config).eval()
    randomise(model, generator)
    if flags["draft_vocab_size"] < VOCABULARY:
        d2t, t2d = offsets(flags["draft_vocab_size"], generator)
        model.load_vocab_mappings(t2d, d2t)
    aux = len(flags["eagle_aux_hidden_state_layer_ids"])
    features = torch.randn(ROWS, aux * WIDTH, generator=generator)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)

    def run() -> None:
        documents = torch.zeros(1, ROWS, dtype=torch.long)
        model(features[None], tokens[None], documents, ttt_steps=STEPS)

    steps = logits_of(model, run)
    record(name, model, {"features": features, "tokens": tokens} | {f"step{i}": x for i, x in enumerate(steps)})


def mtp(name: str, kind: str, changes: dict[str, Any]) -> None:
    """The target's hidden states and all tokens in; logits of the first step out, one row for each hidden state but the
    last few. The later steps shift all rows, which is a layout for training. Embedding and lm_head are the target's."""
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel

    generator = torch.Generator().manual_seed(sum(name.encode()))
    config = MTPSpeculatorConfig(
        transformer_layer_config=body(kind, **changes), speculators_config=speculators_config("mtp")
    )
    model = MTPDraftModel(config).eval()
    randomise(model, generator)
    hidden = torch.randn(ROWS, WIDTH, generator=generator)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    steps = logits_of(model, lambda: model(tokens[None], hidden[None]))
    ends = {"embedding": model.embed_tokens.weight.detach(), "head": model.lm_head.weight.detach()}
    record(name, model, ends | {"hidden": hidden, "tokens": tokens, "step0": steps[0]})


def peagle(name: str, kind: str, changes: dict[str, Any], changed_flags: dict[str, Any]) -> None:
    """Features of the target and the tokens after them in; logits of all rows out, a row being the true one of its
    anchor (depth 0) or the mask token so many places after it."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core
    from speculators.models.peagle.config import PEagleSpeculatorConfig

    generator = torch.Generator().manual_seed(sum(name.encode()))
    flags: dict[str, Any] = {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    flags |= {"mask_token_id": 7} | changed_flags
    config = PEagleSpeculatorConfig(
        transformer_layer_config=body(kind, **changes), speculators_config=speculators_config("peagle"), **flags
    )
    model = core.PEagleDraftModel(config).eval()
    randomise(model, generator)
    if flags["draft_vocab_size"] < VOCABULARY:
        d2t, t2d = offsets(flags["draft_vocab_size"], generator)
        model.load_vocab_mappings(t2d, d2t)
    features = torch.randn(ROWS, 3 * WIDTH, generator=generator)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    drawn: list[tuple[Tensor, Tensor]] = []
    draw = core.generate_cod_sample_indices

    def draw_and_tell(*, seq_length: int, **rest: Any) -> tuple[Tensor, Tensor]:
        drawn.append(draw(seq_length=seq_length, **rest))
        return drawn[-1]

    core.generate_cod_sample_indices = draw_and_tell
    torch.manual_seed(0)
    steps = logits_of(
        model,
        lambda: model(
            features[None],
            tokens[None],
            torch.zeros(1, ROWS, dtype=torch.long),
            verifier_last_hidden_states=torch.randn(1, ROWS, WIDTH, generator=generator),
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=STEPS,
        ),
    )
    core.generate_cod_sample_indices = draw
    rows = {"anchors": drawn[0][0], "depths": drawn[0][1], "logits": steps[0]}
    record(name, model, {"features": features, "tokens": tokens} | rows)


def main() -> None:
    stub(["datasets", "aiohttp", "torchvision", "torchaudio"])
    for name, (kind, changes, flags) in PEAGLE.items():
        peagle(name, kind, changes, flags)
    for name, (kind, changes) in MTP.items():
        mtp(name, kind, changes)
    for name, (kind, changes, flags) in EAGLE3.items():
        eagle3(name, kind, changes, flags)


if __name__ == "__main__":
    main()
