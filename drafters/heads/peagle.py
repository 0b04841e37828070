"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that guesses several tokens in one forward. Behind the last true row come
rows of a mask token with a feature that was learned for want of a true one; each guesses the token after its position.

R rows, L logits rows, A captured layers, T target width, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specdec.drafters.heads import Target
from specdec.drafters.heads.conventions import Raw, overridden
from specdec.drafters.heads.eagle3 import Eagle3, build, convention_of
from specdec.drafters.heads.files import Files
from specdec.errors import ModelError
from specdec.protocols import Attend

MASK_HIDDEN = "mask_hidden"
# Spellings of the mask token's id, the usual first.
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_AHEAD = 8  # what heads are trained for where a file is silent


@dataclass(frozen=True, slots=True)
class PEagleConvention:
    """`mask_token` is the id that stands for tokens not known yet; `ahead` how many tokens one forward guesses."""

    mask_token: int
    ahead: int


class PEagle(nn.Module):
    """Satisfies `Head`. To guess `ahead` tokens, a forward takes the true row of the last token at position p and, from
    p + 1 on, `ahead` - 1 rows of `mask_token` with `mask_features`; each sees all true rows and those before it."""

    def __init__(self, eagle3: Eagle3, mask_hidden: Tensor, convention: PEagleConvention) -> None:
        super().__init__()
        self.name, self.layers, self.taps, self.targets = "peagle", eagle3.layers, eagle3.taps, eagle3.targets
        self.mask_token, self.ahead = convention.mask_token, convention.ahead
        self.eagle3 = eagle3
        self.register_buffer("mask_hidden", mask_hidden)

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """See `Head.features`."""
        return self.eagle3.features(taps)

    def mask_features(self) -> Tensor:
        """`[1, D]`: the feature of every row of the mask token, through the same norms and `fc` as true ones."""
        return self.eagle3.features(self.get_buffer("mask_hidden").chunk(len(self.taps), -1))

    def forward(self, tokens_R: Tensor, features_RD: Tensor | None, positions_R: Tensor, attend: Attend) -> Tensor:
        """See `Head.forward`."""
        out: Tensor = self.eagle3(tokens_R, features_RD, positions_R, attend)
        return out

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """See `Head.logits`."""
        return self.eagle3.logits(hidden_LD)


def open_peagle(
    files: Files, target: Target, overrides: Mapping[str, object], device: torch.device, dtype: torch.dtype
) -> PEagle:
    """See `open_head`."""
    known = convention_of(files)
    own = {name: value for name, value in overrides.items() if name in PEagleConvention.__slots__}
    eagle3 = overridden(known, overrides, "peagle", besides=PEagleConvention.__slots__)
    convention = overridden(_convention(files, own), own, "peagle")
    if not 0 <= convention.mask_token < target.vocab_size:
        raise ModelError(
            f"{files.folder}: mask_token is {convention.mask_token}, which is no id of the target's {target.vocab_size}"
        )
    if convention.ahead < 1:
        raise ModelError(f"{files.folder}: ahead is {convention.ahead}, expected 1 or more")
    if MASK_HIDDEN not in files.tensors:
        raise ModelError(f"{files.folder}: missing tensors: {MASK_HIDDEN}")
    rest = replace(files, tensors={name: x for name, x in files.tensors.items() if name != MASK_HIDDEN})
    head = build(rest, target, eagle3, device, dtype)
    mask_hidden = next(tensor for _, tensor in files.read([MASK_HIDDEN]))
    width = len(head.taps) * target.hidden_size
    if mask_hidden.numel() != width or not mask_hidden.is_floating_point():
        raise ModelError(
            f"{files.folder}: {MASK_HIDDEN} has the shape {list(mask_hidden.shape)}, expected [1, 1, {width}]"
        )
    return PEagle(head, mask_hidden.reshape(1, width).to(device, dtype), convention).eval()


def _convention(files: Files, overrides: Mapping[str, object]) -> PEagleConvention:
    """What config.json says. Raises `ModelError` where it names no mask token and no override does."""
    raw = Raw(files.config, files.config_file, nested=("eagle_config",))
    mask_token = next((token for key in _MASK_TOKENS if (token := raw.get(key, int, -1)) >= 0), -1)
    if mask_token < 0 and "mask_token" not in overrides:
        raise ModelError(
            f"{files.config_file}: the key mask_token_id is missing; name the token with the override mask_token"
        )
    methods = Raw(files.config, files.config_file, nested=("speculators_config",)).get("proposal_methods", tuple, ())
    first = methods[0] if methods and isinstance(methods[0], Mapping) else {}
    return PEagleConvention(mask_token, Raw(first, files.config_file).get("speculative_tokens", int, _AHEAD))
