"""`specdec eval`: what drafts are worth, and what grammars let pass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.cli.delivery import JsonOut, deliver
from specdec.cli.loading import bar, load
from specdec.cli.options import ModelOptions, grouped

app = typer.Typer(help="Measure what drafts are worth, and what grammars let pass.", no_args_is_help=True)

Prompts = Annotated[Path | None, typer.Option(help="Prompts, a JSON object a line; 20 come with specdec.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
SeedOfPrompts = Annotated[int, typer.Option(help="Of every prompt.")]
MaxTokens = Annotated[int, typer.Option(help="End each text after so many.")]
Dialect = Annotated[str | None, typer.Option(help="Of schemas that do not say: 4, 6, 7, 2019-09 or 2020-12.")]
Formats = Annotated[Literal["assert", "annotate"], typer.Option(help="Whether `format` is enforced.")]
Whitespace = Annotated[
    str, typer.Option(metavar="flexible|compact|REGEX", help="What may stand between JSON's tokens.")
]


@app.command()
@grouped
def coupling(
    model: ModelOptions,
    layers: Annotated[int, typer.Option(min=1, help="The draft: so many of the model's first layers.")],
    data: Prompts = None,
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Positions of each text.")] = 36,
    draws: Annotated[int, typer.Option(min=1, help="Draws at each position.")] = 16,
    json_out: JsonOut = None,
) -> None:
    """Set drafts that share the target's noise beside rejection sampling and greedy drafts."""
    from specdec.evals.coupling import measure
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import provenance
    from specdec.evals.report import coupling_tables

    prompts = read_prompts(data or DEFAULT_PROMPTS)
    llm = load(model)
    origin = provenance(llm.loaded)
    with bar("answering", "count") as progress:
        found = measure(
            llm,
            prompts,
            layers,
            temperature=temperature,
            max_tokens=max_tokens,
            draws=draws,
            seed=seed,
            progress=progress,
        )
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    deliver(found, asked, origin, coupling_tables, json_out)


@app.command()
@grouped
def rank_accuracy(
    model: ModelOptions,
    data: Prompts = None,
    temperature: Temperature = 0.0,
    seed: SeedOfPrompts = 0,
    max_tokens: MaxTokens = 256,
    json_out: JsonOut = None,
) -> None:
    """Count how often each guess of a drafter that is a model is right, by rank and depth: for --draft-ranks."""
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import provenance
    from specdec.evals.ranks import measure
    from specdec.evals.report import rank_tables
    from specdec.request import Sampling, Stopping

    prompts = read_prompts(data or DEFAULT_PROMPTS)
    llm = load(model)
    origin = provenance(llm.loaded)
    with bar("answering", "count") as progress:
        found = measure(
            llm,
            prompts,
            Sampling(temperature=temperature, seed=seed),
            Stopping(max_tokens=max_tokens),
            progress=progress,
        )
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    deliver(found, asked, origin, rank_tables, json_out)


@app.command()
@grouped
def acceptance(
    model: ModelOptions,
    data: Prompts = None,
    temperature: Temperature = 0.0,
    seed: SeedOfPrompts = 0,
    max_tokens: MaxTokens = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times to run each prompt; medians are reported.")] = 1,
    whitespace: Annotated[Literal["flexible", "compact"], typer.Option(help="Of JSON under a schema.")] = "flexible",
    json_out: JsonOut = None,
) -> None:
    """Answer prompts with and without drafts: acceptance, tokens per forward, speed, whether the texts are equal."""
    from specdec.evals.acceptance import measure, report
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import provenance
    from specdec.evals.report import acceptance_tables
    from specdec.request import Sampling, Stopping

    prompts = read_prompts(data or DEFAULT_PROMPTS, whitespace=whitespace)
    sampling, stopping = Sampling(temperature=temperature, seed=seed), Stopping(max_tokens=max_tokens)
    llm = load(model)
    origin = provenance(llm.loaded)
    with bar("answering", "count") as progress:
        outcomes = measure(llm, prompts, sampling, stopping, repeats=repeats, progress=progress)
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    asked |= {"repeats": repeats, "whitespace": whitespace}
    deliver(report(outcomes), asked, origin, acceptance_tables, json_out)


@app.command()
def structured(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Folders of the JSON Schema test suite, .jsonl files of schemas with instances."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="byte, a tokenizer.json, or a model whose tokenizer to take.")
    ] = "byte",
    draft: Dialect = None,
    remotes: Annotated[Path | None, typer.Option(help="The suite's folder of remote documents.")] = None,
    formats: Formats = "assert",
    property_order: Annotated[
        Literal["schema", "any"], typer.Option(help="any: reorder an instance's keys before it counts as refused.")
    ] = "schema",
    grammar_order: Annotated[
        Literal["schema", "any"], typer.Option(help="Of the keys that the grammar itself allows.")
    ] = "schema",
    whitespace: Whitespace = "flexible",
    walks: Annotated[int, typer.Option(min=0, help="Random texts a schema.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the random texts.")] = 0,
    backend: Annotated[
        Literal["llguidance", "xgrammar", "outlines"],
        typer.Option(help="llguidance: as specdec serves. The others: by their own, unsound, reading of schemas."),
    ] = "llguidance",
    json_out: JsonOut = None,
) -> None:
    """Replay known instances under the mask, and let random texts be judged by their schemas."""
    from specdec.evals.cases import read_cases, read_remotes
    from specdec.evals.provenance import tokenizer_provenance
    from specdec.evals.report import structured_tables
    from specdec.evals.rivals import rival_compiler
    from specdec.evals.structured import Settings, measure, schema_compiler
    from specdec.evals.vocabulary import open_vocabulary

    cases = read_cases(paths, draft)
    documents = {} if remotes is None else read_remotes(remotes)
    vocabulary = open_vocabulary(tokenizer)
    settings = Settings(formats, whitespace, property_order == "any", walks, seed, grammar_order)
    origin = tokenizer_provenance(vocabulary.name)
    with bar("evaluating", "count") as progress:
        if backend == "llguidance":
            compile_schema = schema_compiler(vocabulary, settings, documents)
        else:
            compile_schema = rival_compiler(vocabulary, backend)
        found = measure(cases, vocabulary, compile_schema, settings, documents, progress=progress)
    asked = {"paths": [str(path) for path in paths], "draft": draft, "formats": formats, "walks_a_schema": walks}
    asked |= {
        "property_order": property_order,
        "grammar_order": grammar_order,
        "whitespace": whitespace,
        "seed": seed,
        "backend": backend,
    }
    deliver(found, asked, origin, structured_tables, json_out)


@app.command()
@grouped
def generate_structured(
    model: ModelOptions,
    data: Annotated[
        list[Path],
        typer.Option(help="Schemas: folders of the JSON Schema test suite, .jsonl files; may be repeated."),
    ],
    draft: Dialect = None,
    formats: Formats = "assert",
    whitespace: Whitespace = "flexible",
    temperature: Temperature = 1.0,
    seed: Annotated[int, typer.Option(help="Of every text.")] = 0,
    max_tokens: MaxTokens = 256,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Texts to draw at once.")] = 16,
    json_out: JsonOut = None,
) -> None:
    """Draw a text under every schema, with and without drafts: whether all that end are valid, and all texts equal."""
    from specdec.evals.cases import read_cases
    from specdec.evals.generations import Settings, measure
    from specdec.evals.provenance import provenance
    from specdec.evals.report import generation_tables

    cases = read_cases(data, draft)
    settings = Settings(temperature, seed, max_tokens, batch, formats, whitespace)
    llm = load(model)
    origin = provenance(llm.loaded)
    with bar("generating", "count") as progress:
        found = measure(llm, cases, settings, progress=progress)
    asked: dict[str, Any] = {
        "data": [str(path) for path in data],
        "draft": draft,
        "formats": formats,
        "whitespace": whitespace,
    }
    asked |= {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "batch": batch}
    deliver(found, asked, origin, generation_tables, json_out)
