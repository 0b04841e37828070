"""From a folder to a head: tells the family by config keys and tensor names, never by the folder's name or the
`architectures` that its writer chose, and has that family open it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from specdec.drafters.heads import Head, Target
from specdec.drafters.heads.files import Files, open_files
from specdec.errors import ModelError
from specdec.models.config import MTP_COUNTS

if TYPE_CHECKING:
    from specdec.drafters.heads.medusa import Medusa

Opener = Callable[[Files, Target, Mapping[str, object], torch.device, torch.dtype], Any]

FAMILIES = {
    "eagle": ("specdec.drafters.heads.eagle", "open_eagle"),
    "medusa": ("specdec.drafters.heads.medusa", "open_medusa"),
    "mtp": ("specdec.drafters.heads.mtp", "open_mtp"),
    "eagle3": ("specdec.drafters.heads.eagle3", "open_eagle3"),
    "peagle": ("specdec.drafters.heads.peagle", "open_peagle"),
}
# Families that have a name and no model here yet.
LATER = ("dflash", "dflash2", "dspark", "xpress")
DRAFT_MODEL = "draft_model"


def open_head(
    path: str | Path,
    target: Target,
    overrides: Mapping[str, object] | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Head | Medusa:
    """The head in a folder, with its weights on `device` in `dtype` (norms stay fp32).

    `overrides` are knobs of its family by name (docs/drafter-models.md). Raises `ModelError` naming the file where it
    cannot be read, is not whole, holds what is not known, does not fit the target or is a whole model of its own
    (`family_of` says "draft_model"), and `ConfigError` for an override that its family does not have.
    """
    files = open_files(Path(path))
    family = _family(files)
    if family == DRAFT_MODEL:
        raise ModelError(f"{path}: a whole language model, not a head: open it as a draft model")
    module, name = FAMILIES[family]
    opener = cast(Opener, getattr(import_module(module), name))
    return cast("Head | Medusa", opener(files, target, overrides or {}, torch.device(device), dtype))


def family_of(path: str | Path) -> str:
    """ "eagle", "eagle3", "peagle", "mtp", "medusa", or "draft_model" for a whole language model. Reads no weights.

    Raises `ModelError` naming the folder for a family that cannot be run, and where nothing is recognised.
    """
    return _family(open_files(Path(path)))


def _family(files: Files) -> str:
    family = _detected(files)
    if family in LATER:
        raise ModelError(
            f"{files.folder}: a {family} drafter, which is not supported; supported: {', '.join(FAMILIES)}"
        )
    if family not in (*FAMILIES, DRAFT_MODEL):
        raise ModelError(
            f"{files.config_file}: speculators_model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


def _detected(files: Files) -> str:
    """The first test that holds decides."""
    config, names = files.config, files.tensors
    text_config = config.get("text_config")
    keys = {key for level in (config, text_config) if isinstance(level, Mapping) for key in level}

    def holds(pattern: str) -> bool:
        return any(re.match(pattern, name) for name in names)

    if isinstance(config.get("speculators_model_type"), str):
        return str(config["speculators_model_type"])
    medusa_file = any(stored.file.name.startswith("medusa_lm_head.") for stored in names.values())
    if "medusa_num_heads" in keys or medusa_file or holds(r"(medusa_head\.)?\d+\.0\.linear\.weight$"):
        return "medusa"
    if holds(r"blocks\.0\.layers\.0\.weight$"):
        return "medusa"
    block_config = config.get("dflash_config")
    projector = block_config.get("projector_type") if isinstance(block_config, Mapping) else None
    is_dspark = "markov_rank" in keys and ("projector_type" in keys or "block_size" in keys)
    if holds(r"markov_head\.") or is_dspark or projector == "dspark":
        return "dspark"
    if holds(r"candidate_selector\.|.*\.attention_conv\."):
        return "dflash2"
    if holds(r"(xpress|refiner)_head\."):
        return "xpress"
    if {"fc.weight", "hidden_norm.weight"} <= names.keys() or "dflash_config" in keys:
        return "dflash"
    if "layers.0.hidden_norm.weight" in names or "d2t" in names:
        return "peagle" if "mask_hidden" in names else "eagle3"
    if "fc.weight" in names and "layers.0.input_layernorm.weight" not in names:
        return "eagle"
    if (keys & set(MTP_COUNTS) and holds(r"(mtp|mtp_layers|layers\.\d+\.(eh_proj|enorm))\.")) or holds(r"mtp\.fc\."):
        return "mtp"
    if {"embed_tokens.weight", "layers.0.input_layernorm.weight"} <= names.keys() or holds(r"language_model\."):
        return DRAFT_MODEL
    shown = ", ".join(sorted(names)[:4])
    raise ModelError(f"{files.folder}: no drafter that is known holds these tensors: {shown}")
