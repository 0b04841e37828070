"""The composition root: from a model's name and some options to an engine that runs. Here, and in the command line,
the core may look up at drafters and grammar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specdec import __version__
from specdec.batch import NOBODY
from specdec.chat import ChatTemplate
from specdec.config import EngineConfig
from specdec.costs import cost_table, drafter_costs
from specdec.cpu import cpu_name
from specdec.drafters.grow import Growth, read_ranks
from specdec.drafters.open import Setup, family
from specdec.drafting import all_taps
from specdec.engine import Engine
from specdec.errors import ConfigError, InvalidRequest, ModelError
from specdec.grammar.compile import Compiler, check_backend
from specdec.kernels.device import launch_problem
from specdec.kv import Pool
from specdec.loader import Checkpoint, load, open_checkpoint
from specdec.policy import Policy
from specdec.protocols import Drafter, Model, Runner
from specdec.pull import cache_folder
from specdec.quant import has_bf16, has_onednn, pack_bf16, pack_fp32, quantize_int8
from specdec.request import PREDICTION, Sampling, Stopping
from specdec.runner import TorchRunner
from specdec.sizing import fitting, measured_room
from specdec.text import Detokenizer
from specdec.tokenizer import Tokenizer
from specdec.tree import MAX_DRAFTS
from specdec.warmup import warm_up

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DRAFTER = "forced,suffix"
DEFAULT_UTILIZATION = 0.9
LARGEST_GPU_HEAD = 256
FEWEST_BLOCKS = 2  # until it is known how many fit

HEADS = ("eagle", "eagle3", "peagle", "mtp", "medusa")
OWN_FILES = ("draft_model", *HEADS)  # drafters that have files
MODELS = ("layer_skip", *OWN_FILES)
# Where each drafter is found, by name, and which facts of the target it is made with; imported when used.
DRAFTERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "none": ("specdec.drafters.none", "NoDrafter", ()),
    "forced": ("specdec.drafters.forced", "ForcedDrafter", ("spell",)),
    "ngram": ("specdec.drafters.ngram", "NgramDrafter", ()),
    "suffix": ("specdec.drafters.suffix", "SuffixDrafter", ()),
    "prediction": ("specdec.drafters.prediction", "PredictionDrafter", ()),
    "draft_model": ("specdec.drafters.open", "draft_model", ("setup", "argument")),
    "layer_skip": ("specdec.drafters.open", "layer_skip", ("setup", "argument")),
    **dict.fromkeys(HEADS, ("specdec.drafters.open", "head", ("setup", "argument"))),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to run a model. `None` lets the machine or the model decide.

    `device` is "cpu" or "cuda"; `dtype` "float32" or "bfloat16"; `quantize` "int8" (CPU only) or None;
    `kv_cache_tokens` is the size of the KV pool in tokens; on a GPU, where it is left out, what fits in
    `gpu_memory_utilization` (0.9) of its memory; `enforce_eager` captures no CUDA graphs; `drafter` is a
    comma-separated list of drafters, of which `draft_model` names the files of one that is a model or a head
    (`draft_overrides` are its knobs, docs/drafter-models.md), whose trees have up to `draft_depth` levels, shaped
    by the file `draft_ranks` of `specdec eval rank-accuracy` where there is one; `policy` is "auto" (verify guesses
    that are worth their rows, by costs measured once) or "fixed" (verify up to `max_drafts`); `grammar_backend` is
    "auto", "llguidance", "xgrammar" or "outlines" (see `Compiler`).
    """

    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    block_size: int = 16
    max_num_seqs: int = 64
    max_rows: int = 512
    max_drafts: int = 16
    max_waiting: int = 256
    prefix_caching: bool = True
    drafter: str = DEFAULT_DRAFTER
    draft_model: str | None = None
    draft_overrides: Mapping[str, Any] = field(default_factory=dict)
    draft_depth: int = 6
    draft_ranks: str | None = None
    policy: str = "auto"
    chat_template: str | None = None
    use_generation_config: bool = True
    threads: int | None = None
    grammar_backend: str = "auto"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target that is ready: what turns text into requests and back, and the engine that runs them.

    `default_sampling` is how a request is sampled that says nothing of it; `options` are those it was built with, on
    `device`, "cpu" or "cuda".
    """

    name: str
    options: Options
    device: str
    engine: Engine
    tokenizer: Tokenizer
    compiler: Compiler
    template: ChatTemplate | None
    default_sampling: Sampling

    @property
    def max_model_len(self) -> int:
        """Prompt and output together, in tokens."""
        return self.engine.config.max_model_len


def build(
    source: str = DEFAULT_MODEL, options: Options | None = None, *, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Open, load and wire a model.

    `source` is a folder, a .gguf file, a name that `specdec pull` knows, or a hub id; `progress` is told how many
    tensors are loaded and how many there are. Raises `ModelError` for the files and `ConfigError` for the options, also
    where a GPU's memory is too small for what they ask for.
    """
    try:
        return _built(source, options or Options(), progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{source} and what it is run with do not fit into the GPU's memory: make kv_cache_tokens, "
            f"max_num_batched_tokens or gpu_memory_utilization smaller, or set enforce_eager: {error}"
        ) from error


def _built(source: str, options: Options, progress: Callable[[int, int], None] | None) -> LoadedModel:
    names = drafter_names(options.drafter, None if options.draft_model is None else family(options.draft_model))
    device = _checked_device(options)
    checkpoint = open_checkpoint(source)
    config = engine_config(checkpoint, options, least=device == "cuda")
    if device == "cuda" and checkpoint.config.head_dim > LARGEST_GPU_HEAD:
        size = checkpoint.config.head_dim
        raise ConfigError(f"attention on device cuda takes heads up to {LARGEST_GPU_HEAD}, and this model's are {size}")
    sampling = default_sampling(checkpoint) if options.use_generation_config else Sampling()
    tokenizer = open_tokenizer(checkpoint)
    template = _template(checkpoint, tokenizer, options)
    growth = Growth(options.draft_depth, ranks=None if options.draft_ranks is None else read_ranks(options.draft_ranks))
    model, cache_dtype = _load(checkpoint, options, device, progress)
    sized_later = device == "cuda" and options.kv_cache_tokens is None
    captured_blocks = _captured_blocks(config, options, device)
    num_blocks = FEWEST_BLOCKS if sized_later else config.num_blocks
    pool = Pool(num_blocks, config.block_size, device, cache_dtype, captured_blocks=captured_blocks)
    plain = TorchRunner(model, num_blocks=pool.num_blocks, block_size=pool.block_size, device=device, dtype=cache_dtype)
    pool.own(plain.cache)
    setup = Setup(
        checkpoint,
        model,
        plain.cache,
        pool,
        tokenizer,
        growth,
        lambda draft: _load(draft, options, device, None)[0],
        open_tokenizer,
        options.draft_model,
        options.draft_overrides,
    )
    drafters = make_drafters(names, setup)
    runner: Runner = plain
    if captured_blocks:
        from specdec.graphs import GraphRunner  # needs triton, which a CPU does without

        taps = all_taps(drafters) if config.max_drafts else ()
        graphs = GraphRunner(plain, max_rows=config.max_rows, max_blocks=captured_blocks, taps=taps)
        pool.serve(graphs)
        runner = graphs
    if sized_later:
        config = _filled(config, options, plain, pool)
    pool.capture()
    ends = end_tokens(checkpoint, model.vocab_size)
    engine = Engine(runner, drafters, config, new_text=_new_text(tokenizer), end_tokens=ends)
    if device == "cuda":
        warm_up(engine)
    if options.policy == "auto":
        engine.policy = _policy(engine, checkpoint, names, options, device)
    told = (checkpoint.name, device, config.max_model_len, config.num_slots, options.drafter)
    logger.info("%s on %s: context %d, KV cache of %d tokens, drafter %s", *told)
    compiler = Compiler(tokenizer.json, model.vocab_size, ends, tokenizer.special_ids, backend=options.grammar_backend)
    return LoadedModel(checkpoint.name, options, device, engine, tokenizer, compiler, template, sampling)


def drafter_names(names: str, family: str | None = None) -> tuple[str, ...]:
    """The drafters of a comma-separated list, each once; none for "none" or nothing. Where there is any, the one that
    reads requests' predictions comes first, named or not: it costs nothing without them. The `family` of a drafter's
    files (see `drafters.open.family`) is one of them too, named or not. A name may end in a number for its drafter
    (`layer_skip:20`).

    Raises `ConfigError` for a name that is not known, comes twice or has no files, or "none" beside others.
    """
    chosen = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    bare = {name: name.partition(":")[0] for name in chosen}
    if family is not None and family not in bare.values():
        chosen, bare = {**chosen, family: None}, {**bare, family: family}
    for name in chosen:
        if bare[name] not in DRAFTERS:
            raise ConfigError(f"drafter {name!r} is not known; there are {', '.join(DRAFTERS)}")
        if list(bare.values()).count(bare[name]) > 1:
            raise ConfigError(f"drafter {bare[name]} is named twice, got {names!r}")
        # Multi-token prediction may come with the target itself, and then runs without other files.
        if bare[name] in OWN_FILES and bare[name] != (family or "mtp"):
            held = "name them with --draft-model" if family is None else f"those of --draft-model are a {family}"
            raise ConfigError(f"drafter {name} needs files of its own: {held}")
    if "none" in chosen and len(chosen) > 1:
        raise ConfigError(f"drafter none stands alone, got {names!r}")
    return () if not chosen or "none" in chosen else tuple(dict.fromkeys([PREDICTION, *chosen]))


def make_drafters(names: Sequence[str], setup: Setup) -> list[Drafter]:
    """The drafters of `drafter_names` for one target. Raises `ConfigError`, also for options that none of them takes
    notice of, and `ModelError` for files of models."""
    chosen = {name.partition(":")[0] for name in names}
    if setup.overrides and chosen.isdisjoint(OWN_FILES):
        raise ConfigError(f"draft_overrides are for heads, got {', '.join(setup.overrides)} and no head")
    if setup.growth.ranks is not None and chosen.isdisjoint(MODELS):
        raise ConfigError(f"draft_ranks are for drafters that are models: {', '.join(MODELS)}; none of them runs")
    drafters: list[Drafter] = []
    for name in names or ["none"]:
        bare, _, argument = name.partition(":")
        module, attribute, needs = DRAFTERS[bare]
        if argument and "argument" not in needs:
            raise ConfigError(f"drafter {bare} takes no number, got {name!r}")
        facts = {"spell": setup.tokenizer.token_bytes, "setup": setup, "argument": argument}
        drafters.append(_find(module, attribute)(*(facts[need] for need in needs)))
    return drafters


def engine_config(checkpoint: Checkpoint, options: Options, *, least: bool = False) -> EngineConfig:
    """Sizes of the engine, from the options and the model's context; the pool, unless its size is asked for, of two
    contexts, or the `least` that will do."""
    limit = checkpoint.config.max_position_embeddings
    length = limit if options.max_model_len is None else options.max_model_len
    if length > limit:
        raise ConfigError(f"max_model_len must be at most the model's {limit}, got {length}")
    return EngineConfig(
        max_model_len=length,
        num_slots=(1 if least else 2) * length + MAX_DRAFTS + 2
        if options.kv_cache_tokens is None
        else options.kv_cache_tokens,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_rows=options.max_rows,
        max_drafts=options.max_drafts,
        max_waiting=options.max_waiting,
        prefix_caching=options.prefix_caching,
    )


def _checked_device(options: Options) -> str:
    """Where the model runs, "cpu" or "cuda". Raises `ConfigError` for options that cannot be, whatever the model is;
    torch takes as many threads as are asked for."""
    if not 1 <= options.draft_depth <= MAX_DRAFTS:
        raise ConfigError(f"draft_depth must be between 1 and {MAX_DRAFTS}, got {options.draft_depth}")
    if options.policy not in ("auto", "fixed"):
        raise ConfigError(f"policy must be auto or fixed, got {options.policy!r}")
    check_backend(options.grammar_backend)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {device!r}")
    _check_gpu(options, device)
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    return device


def _check_gpu(options: Options, device: str) -> None:
    """Raises `ConfigError` where there is no GPU to use, and for options of GPUs beside a CPU."""
    utilization = options.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    if device == "cpu":
        if utilization is not None or options.enforce_eager:
            name = "enforce_eager" if utilization is None else "gpu_memory_utilization"
            raise ConfigError(f"{name} is for device cuda; this is {device}")
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU here" if built else f"torch {torch.__version__} is built for CPUs only"
        raise ConfigError(f"device is cuda, but {why}; leave it out to run on the CPU")
    if find_spec("triton") is None:
        raise ConfigError("device cuda needs triton: it comes with the extra `gpu`, on Linux")
    problem = launch_problem()
    if problem is not None:
        raise ConfigError(
            f"device cuda needs kernels that triton launches, for which it takes a C compiler and Python's headers "
            f"(gcc and python3-dev): {problem}"
        )
    if utilization is not None and options.kv_cache_tokens is not None:
        raise ConfigError("gpu_memory_utilization says how much fits and kv_cache_tokens how much is taken: give one")


def _captured_blocks(config: EngineConfig, options: Options, device: str) -> int:
    """See `Pool`: as many as all texts that run at once may need together; 0 where nothing is captured."""
    if device == "cpu" or options.enforce_eager:
        return 0
    return config.max_num_seqs * -(-(config.max_model_len + MAX_DRAFTS + 1) // config.block_size)


def _filled(config: EngineConfig, options: Options, runner: TorchRunner, pool: Pool) -> EngineConfig:
    """`config` with as many blocks as fit on the device beside all that is loaded; the caches are made as large."""
    utilization = options.gpu_memory_utilization or DEFAULT_UTILIZATION
    largest = NOBODY.padded(config.max_rows)
    num_bytes = measured_room(pool, lambda: runner.forward(largest).logits_LV, utilization) + pool.num_bytes
    num_blocks = fitting(
        num_bytes,
        pool.num_bytes // pool.num_blocks,
        least=config.num_blocks,
        utilization=utilization,
        max_model_len=config.max_model_len,
    )
    pool.resize(num_blocks)
    return replace(config, num_slots=(num_blocks - 1) * config.block_size)


def default_sampling(checkpoint: Checkpoint) -> Sampling:
    """The sampling that a model's generation_config.json asks for. Raises `ModelError` for values out of range."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: checkpoint.generation[name] for name in names if checkpoint.generation.get(name) is not None}
    if values.get("top_k") == -1:  # how some models say that all are kept
        values["top_k"] = 0
    try:
        return Sampling(**values)
    except InvalidRequest as error:
        raise ModelError(f"{checkpoint.path}: generation_config.json: {error}") from error


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint names: a tokenizer.json, or one rebuilt from GGUF metadata and cached."""
    if isinstance(checkpoint.tokenizer, Path):
        return Tokenizer.from_file(checkpoint.tokenizer)
    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in checkpoint.tokenizer.items()}
    return Tokenizer.from_gguf(metadata, cache_folder() / "tokenizers")


def end_tokens(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """The model's whole list of end tokens. Raises `ModelError` where there is none, or none that it can draw."""
    ends = tuple(token for token in checkpoint.end_ids if 0 <= token < vocab_size)
    if not ends:
        raise ModelError(f"{checkpoint.path}: the model names no end token below its vocabulary of {vocab_size}")
    return ends


def _policy(engine: Engine, checkpoint: Checkpoint, names: Sequence[str], options: Options, device: str) -> Policy:
    """Weighs guesses by what forwards and drafters cost here, measured now unless it was before."""
    facts, folder = _facts(checkpoint, options, device), cache_folder() / "costs"
    drafts: dict[str, object] = {"drafters": names, "draft_model": options.draft_model}
    drafts |= {"draft_depth": options.draft_depth, "draft_ranks": options.draft_ranks}
    drafts |= {"draft_overrides": dict(options.draft_overrides)}
    costs = cost_table(engine, facts, folder)
    return Policy(engine.config.max_rows, costs, drafter_costs(engine, {**facts, **drafts}, folder))


def _facts(checkpoint: Checkpoint, options: Options, device: str) -> dict[str, object]:
    """What a forward's time depends on: the model, how it runs, and on what."""
    return {
        "config": repr(checkpoint.config),
        "dtype": options.dtype,
        "quantize": options.quantize,
        "block_size": options.block_size,
        "enforce_eager": options.enforce_eager,
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "specdec": __version__,
    }


def _load(
    checkpoint: Checkpoint, options: Options, device: str, progress: Callable[[int, int], None] | None
) -> tuple[Model, torch.dtype]:
    """The model as the options want it, and the dtype of its KV cache.

    On a CPU activations and KV stay in fp32 whatever the weights are: only the linears change.
    """
    if options.dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"dtype must be float32 or bfloat16, got {options.dtype!r}")
    if options.quantize not in (None, "int8"):
        raise ConfigError(f"quantize must be int8, got {options.quantize!r}")
    if device == "cuda":
        if options.quantize:
            raise ConfigError(f"quantize {options.quantize} runs on a CPU only; leave it out for device cuda")
        dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
        return load(checkpoint, device=device, dtype=dtype, progress=progress), dtype
    model = load(checkpoint, dtype=torch.float32, progress=progress)
    if options.quantize:
        quantize_int8(model)
    elif options.dtype == "bfloat16" or (options.dtype is None and has_bf16()):
        pack_bf16(model)
    elif has_onednn():
        pack_fp32(model)
    return model, torch.float32


def _new_text(tokenizer: Tokenizer) -> Callable[[Stopping], Detokenizer]:
    def new_text(stopping: Stopping) -> Detokenizer:
        return tokenizer.detokenizer(stopping.stop, stopping.include_stop, min_tokens=stopping.min_tokens)

    return new_text


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer, options: Options) -> ChatTemplate | None:
    text = checkpoint.chat_template
    if options.chat_template is not None:
        try:
            text = Path(options.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {options.chat_template}: cannot be read: {error}") from error
    return None if text is None else ChatTemplate(text, tokenizer)


def _find(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
