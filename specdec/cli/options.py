"""The options that commands share, each declared once, and how a command takes a group of them.

Knows names, types and help texts; imports nothing heavy, so that `--help` is quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from specdec.pull import PACKAGED

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DRAFTER = "forced,suffix"

_MODEL, _SAMPLING, _CONSTRAINT = "Model", "Sampling", "Constraint (at most one)"
_COUNT_UNITS = {"k": 1024, "m": 1024 * 1024}


def count(text: str | int) -> int:
    """A whole number of tokens from 1; `8k` is 8,192. Raises `typer.BadParameter` for anything else."""
    if isinstance(text, int):
        return text
    digits, unit = (text[:-1], _COUNT_UNITS[text[-1].lower()]) if text[-1:].lower() in _COUNT_UNITS else (text, 1)
    if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
        raise typer.BadParameter(f"{text!r} is not a whole number of tokens from 1, such as 8192 or 8k")
    return int(digits) * unit


def row_counts(text: str) -> list[int]:
    """The row counts in `1,8,16`, rising and without repeats. Raises `typer.BadParameter` for one outside 1 to 63."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 63 for part in parts):
        raise typer.BadParameter(f"--rows: {text!r} is not a list of row counts from 1 to 63, such as 1,8,16")
    return sorted({int(part) for part in parts})


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how to run it."""

    model: Annotated[
        str, typer.Argument(help=f"{', '.join(PACKAGED)}, a folder in Hugging Face layout, a .gguf file, or a hub id.")
    ] = DEFAULT_MODEL
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; if left out, cuda where there is one.", rich_help_panel=_MODEL)
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; if left out, what this machine is quick at.", rich_help_panel=_MODEL),
    ] = None
    quantize: Annotated[
        str | None, typer.Option(help="int8: weights and activations of the linears, on a CPU.", rich_help_panel=_MODEL)
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="Prompt + output; 8k is 8192. If left out, the model's own.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="Size of the KV cache; if left out, two contexts; of a GPU, what fits.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of a GPU's memory to use; if left out, 0.9.", rich_help_panel=_MODEL),
    ] = None
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Capture no CUDA graphs.", rich_help_panel=_MODEL)
    ] = False
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.", rich_help_panel=_MODEL)] = 16
    max_num_seqs: Annotated[int, typer.Option(help="Texts that run at once.", rich_help_panel=_MODEL)] = 64
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(parser=count, metavar="TOKENS", help="Rows of one forward at most.", rich_help_panel=_MODEL),
    ] = 512
    drafter: Annotated[
        str,
        typer.Option(
            help="Drafters, separated by commas: forced, ngram, suffix, prediction, draft_model, layer_skip[:LAYERS], "
            "mtp; or none.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_DRAFTER
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A drafter with files: a model with the same tokenizer, EAGLE, EAGLE-3, P-EAGLE, MTP or Medusa.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    draft_overrides: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="What the files of a head do not say.", rich_help_panel=_MODEL),
    ] = None
    draft_ranks: Annotated[
        Path | None,
        typer.Option(help="Shape trees by this file of `eval rank-accuracy`.", rich_help_panel=_MODEL),
    ] = None
    draft_depth: Annotated[
        int, typer.Option(min=1, max=62, help="Levels of trees that models guess.", rich_help_panel=_MODEL)
    ] = 6
    policy: Annotated[
        Literal["auto", "fixed"],
        typer.Option(
            help="auto: verify guesses that are worth their rows. fixed: up to --max-drafts.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    max_drafts: Annotated[int, typer.Option(help="Guesses a step, 0 to 62.", rich_help_panel=_MODEL)] = 16
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep the KV of prompts for later requests.", rich_help_panel=_MODEL)
    ] = True
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file to use for the model's own.", rich_help_panel=_MODEL)
    ] = None
    generation_config: Annotated[
        str,
        typer.Option(metavar="auto|none", help="Whether the model sets defaults.", rich_help_panel=_MODEL),
    ] = "auto"
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; if left out, torch decides.", rich_help_panel=_MODEL)
    ] = None
    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar", "outlines"],
        typer.Option(
            help="What compiles regular expressions and choices; it changes no meaning. Other constraints have one "
            "backend that enforces them whole.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are picked, and when a text ends. None: the model's own default."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 always takes the likeliest token; if left out, the model's own, else 1.", rich_help_panel=_SAMPLING
        ),
    ] = None
    top_p: Annotated[float | None, typer.Option(help="Keep this share of probability.", rich_help_panel=_SAMPLING)] = (
        None
    )
    top_k: Annotated[int | None, typer.Option(help="Keep so many tokens; 0 keeps all.", rich_help_panel=_SAMPLING)] = (
        None
    )
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens at least so likely beside the best.", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)] = (
        None
    )
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="End after so many; if left out, where the context does.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.", rich_help_panel=_SAMPLING)
    ] = None


@dataclass(frozen=True, slots=True)
class ConstraintOptions:
    """What the text must be."""

    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="JSON under this schema.", rich_help_panel=_CONSTRAINT),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Any JSON object.", rich_help_panel=_CONSTRAINT)] = False
    regex: Annotated[str | None, typer.Option(help="Matches from end to end.", rich_help_panel=_CONSTRAINT)] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="One of these; repeat the option.", rich_help_panel=_CONSTRAINT)
    ] = None
    ebnf: Annotated[Path | None, typer.Option(help="A grammar in a file.", rich_help_panel=_CONSTRAINT)] = None
    lark: Annotated[Path | None, typer.Option(help="A Lark grammar in a file.", rich_help_panel=_CONSTRAINT)] = None
    structural_tag: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="Text whose tags hold what they must.", rich_help_panel=_CONSTRAINT),
    ] = None
    whitespace: Annotated[
        str,
        typer.Option(
            metavar="flexible|compact|REGEX", help="What may stand between JSON's tokens.", rich_help_panel=_CONSTRAINT
        ),
    ] = "flexible"
    property_order: Annotated[
        Literal["schema", "any"], typer.Option(help="Of the keys of --json-schema.", rich_help_panel=_CONSTRAINT)
    ] = "schema"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are option groups (dataclasses, as above) become the group's fields.

    Typer sees each field as a parameter; the command is called with the groups put together again.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            field_hints = get_type_hints(hints[name], include_extras=True)
            flat += [_parameter(field, field_hints[field.name]) for field in fields(hints[name])]
        else:
            flat.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    assert field.default is not MISSING, f"option {field.name} has no default"
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation)
