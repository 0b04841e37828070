"""`specdec bench`: how long the engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.delivery import JsonOut, deliver
from specdec.cli.loading import bar, load
from specdec.cli.options import ModelOptions, grouped, row_counts

app = typer.Typer(help="Measure the engine.", no_args_is_help=True)


@app.command()
@grouped
def decode(
    model: ModelOptions,
    rows: Annotated[str, typer.Option(help="Rows of a step, from 1 to 63, separated by commas.")] = "1,8,16",
    context: Annotated[int, typer.Option(help="Tokens in the KV cache.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Sequences to measure; medians are reported.")] = 8,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time of a step goes.")] = False,
    json_out: JsonOut = None,
) -> None:
    """Time whole engine steps of one sequence that verifies drafts of which none is right, and a prompt's reading."""
    from specdec.evals.bench import bench_decode
    from specdec.evals.provenance import provenance
    from specdec.evals.report import bench_tables

    counts = row_counts(rows)
    llm = load(model, max_drafts=max(counts) - 1, policy="fixed")
    origin = provenance(llm.loaded)
    with bar("measuring", "count") as progress:
        found = bench_decode(llm, counts, context=context, rounds=rounds, profile=profile, progress=progress)
    deliver(found, {}, origin, bench_tables, json_out)


@app.command()
def grammar(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="As of `specdec eval structured`.")],
    tokenizer: Annotated[
        str, typer.Option(help="byte, a tokenizer.json, or a model whose tokenizer to take.")
    ] = "smollm2-135m",
    walks: Annotated[int, typer.Option(min=1, help="Random texts, and trees, a schema.")] = 4,
    property_order: Annotated[Literal["schema", "any"], typer.Option(help="In which order keys may come.")] = "schema",
    json_out: JsonOut = None,
) -> None:
    """Time the rows and draft trees of JSON Schemas, with and without a checker beside the grammar."""
    from specdec.evals.bench_grammar import bench_grammar
    from specdec.evals.cases import read_cases
    from specdec.evals.provenance import tokenizer_provenance
    from specdec.evals.report import grammar_tables
    from specdec.evals.vocabulary import open_vocabulary

    cases, vocabulary = read_cases(paths, None), open_vocabulary(tokenizer)
    origin = tokenizer_provenance(vocabulary.name)
    with bar("measuring", "count") as progress:
        found = bench_grammar(cases, vocabulary, walks=walks, property_order=property_order, progress=progress)
    asked = {"paths": [str(path) for path in paths], "walks_a_schema": walks, "property_order": property_order}
    deliver(found, asked, origin, grammar_tables, json_out)


@app.command()
@grouped
def constrained(
    model: ModelOptions,
    tokens: Annotated[int, typer.Option(min=8, max=96, help="Of each text.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Texts a schema, each beside a free one.")] = 6,
    json_out: JsonOut = None,
) -> None:
    """Time a token under several schemas beside one of free text, without drafts, in turns."""
    from specdec.evals.bench_grammar import bench_constrained
    from specdec.evals.provenance import provenance
    from specdec.evals.report import constrained_tables

    llm = load(model)
    origin = provenance(llm.loaded)
    with bar("measuring", "count") as progress:
        found = bench_constrained(llm, tokens=tokens, rounds=rounds, progress=progress)
    deliver(found, {}, origin, constrained_tables, json_out)
