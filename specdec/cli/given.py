"""What the options of a command line ask for, as the values that the engine takes. Knows the options; runs no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.options import ConstraintOptions, ModelOptions, SamplingOptions
from specdec.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from specdec.build import Options
    from specdec.grammar.spec import Spec
    from specdec.llm import LLM
    from specdec.request import Sampling, Stopping


def engine_options(
    given: ModelOptions, *, max_drafts: int | None = None, max_waiting: int = 256, policy: str | None = None
) -> Options:
    """How to run the model; `max_drafts` and `policy` where a command decides, and not its user. Raises `ConfigError`
    for values that no option may have."""
    from specdec.build import Options

    if given.generation_config not in ("auto", "none"):
        raise ConfigError(f"--generation-config must be auto or none, got {given.generation_config!r}")
    return Options(
        device=given.device,
        dtype=given.dtype,
        quantize=given.quantize,
        max_model_len=given.max_model_len,
        kv_cache_tokens=given.kv_cache_tokens,
        gpu_memory_utilization=given.gpu_memory_utilization,
        enforce_eager=given.enforce_eager,
        block_size=given.block_size,
        max_num_seqs=given.max_num_seqs,
        max_rows=given.max_num_batched_tokens,
        max_drafts=given.max_drafts if max_drafts is None else max_drafts,
        max_waiting=max_waiting,
        prefix_caching=given.prefix_caching,
        drafter=given.drafter,
        draft_model=given.draft_model,
        draft_overrides=_overrides(given.draft_overrides),
        draft_depth=given.draft_depth,
        draft_ranks=None if given.draft_ranks is None else str(given.draft_ranks),
        policy=given.policy if policy is None else policy,
        chat_template=None if given.chat_template is None else str(given.chat_template),
        use_generation_config=given.generation_config == "auto",
        threads=given.threads,
        grammar_backend=given.grammar_backend,
    )


def _overrides(text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--draft-overrides must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--draft-overrides must be a JSON object, got {text!r:.80}")
    return value


def sampling_of(llm: LLM, given: SamplingOptions) -> Sampling:
    """The sampling that was asked for; what was left open is the model's own default."""
    asked: dict[str, Any] = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
    asked |= {"min_p": given.min_p, "seed": given.seed}
    return replace(llm.loaded.default_sampling, **{name: value for name, value in asked.items() if value is not None})


def stopping_of(given: SamplingOptions) -> Stopping:
    """When a text ends."""
    from specdec.request import Stopping

    return Stopping(max_tokens=given.max_tokens, stop=tuple(given.stop or ()))


def spec_of(given: ConstraintOptions) -> tuple[str, Spec | None]:
    """What was asked for, as the user wrote it, and the one constraint that it is.

    Raises `InvalidRequest` for two, or one that is wrong in itself, and `ConfigError` for an unreadable file.
    """
    from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag

    whitespace, order = given.whitespace, given.property_order
    asked: dict[str, Callable[[], Spec]] = {}
    if given.json_schema is not None:
        text = given.json_schema
        if text.lstrip().startswith("{"):
            asked["--json-schema"] = lambda: JsonSchema(text, whitespace, property_order=order)
        else:
            asked[f"--json-schema {text}"] = lambda: JsonSchema(read_text(Path(text)), whitespace, property_order=order)
    if given.json:
        asked["--json"] = lambda: JsonObject(whitespace)
    if given.regex is not None:
        pattern = given.regex
        asked["--regex"] = lambda: Regex(pattern)
    if given.choice:
        options = tuple(given.choice)
        asked["--choice"] = lambda: Choice(options)
    if given.ebnf is not None:
        path = given.ebnf
        asked[f"--ebnf {path}"] = lambda: Ebnf(read_text(path))
    if given.lark is not None:
        lark = given.lark
        asked[f"--lark {lark}"] = lambda: Lark(read_text(lark))
    if given.structural_tag is not None:
        tag = given.structural_tag
        if tag.lstrip().startswith("{"):
            asked["--structural-tag"] = lambda: StructuralTag(tag, whitespace)
        else:
            asked[f"--structural-tag {tag}"] = lambda: StructuralTag(read_text(Path(tag)), whitespace)
    if whitespace != "flexible" and not (given.json or given.json_schema or given.structural_tag):
        raise InvalidRequest("--whitespace", "means nothing without --json-schema, --json or --structural-tag")
    if order != "schema" and given.json_schema is None:
        raise InvalidRequest("--property-order", "means nothing without --json-schema")
    if len(asked) > 1:
        raise InvalidRequest(list(asked)[1], f"constrains a text that {next(iter(asked))} constrains already")
    for name, make in asked.items():
        try:
            return name, make()
        except InvalidRequest as error:
            raise InvalidRequest(name, error.message, code=error.code) from error
    return "", None


def compile_spec(llm: LLM, name: str, spec: Spec | None) -> None:
    """Have the grammar ready, so that what is wrong with it is said of `name`. Raises `InvalidRequest`."""
    if spec is not None:
        llm.loaded.compiler.compile(spec, name)


def read_text(path: Path) -> str:
    """A file that an option names. Raises `ConfigError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
