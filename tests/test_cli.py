"""The command line on a tiny model: what it prints, what it refuses in one line, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.cli.options import ConstraintOptions, ModelOptions, SamplingOptions, count, grouped, row_counts
from specdec.evals.prompts import DEFAULT_PROMPTS
from tests.server.conftest import write_model

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "bare", template=None))


def invoke(*arguments: str, stdin: str | None = None) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def specdec_process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=ROOT, timeout=120
    )


# Options


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8k", 8192), ("32K", 32768), ("1m", 1048576), (7, 7)])
def test_counts_may_be_written_short(text: str | int, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize("text", ["", "k", "0", "0k", "8 k", "-8", "8.5k", "8kk", "²", "eight"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a whole number of tokens"):
        count(text)


def test_row_counts_rise_without_repeats() -> None:
    assert row_counts("16, 1,8,8") == [1, 8, 16]
    for text in ("", "0", "64", "1,,2", "1;2", "²"):
        with pytest.raises(typer.BadParameter, match="row counts from 1 to 63"):
            row_counts(text)


def test_a_group_of_options_is_declared_once_and_arrives_whole() -> None:
    arrived = []

    @grouped
    def command(model: ModelOptions, sampling: SamplingOptions, constraint: ConstraintOptions) -> None:
        """Say what arrived."""
        arrived.append((model, sampling, constraint))

    small = typer.Typer()
    small.command()(command)
    result = CliRunner().invoke(
        small, ["some/model", "--max-model-len", "8k", "--no-prefix-caching", "--stop", "a", "--stop", "b", "--json"]
    )
    assert result.exit_code == 0, result.output
    ((model, sampling, constraint),) = arrived
    assert model == ModelOptions("some/model", max_model_len=8192, prefix_caching=False)
    assert sampling == SamplingOptions(stop=["a", "b"])
    assert constraint == ConstraintOptions(json=True)


def test_every_model_option_reaches_the_engine(folder: str) -> None:
    from specdec.build import Options
    from specdec.cli.given import engine_options

    given = ModelOptions(
        folder,
        device="cpu",
        dtype="float32",
        quantize="int8",
        max_model_len=1,
        kv_cache_tokens=2,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        block_size=3,
        max_num_seqs=4,
        max_num_batched_tokens=5,
        drafter="none",
        draft_model="d",
        draft_overrides='{"features": "after_norm"}',
        draft_ranks=Path("r.json"),
        draft_depth=8,
        policy="fixed",
        max_drafts=6,
        prefix_caching=False,
        chat_template=Path("t.jinja"),
        generation_config="none",
        threads=7,
        grammar_backend="llguidance",
    )
    assert engine_options(given, max_waiting=8) == Options(
        device="cpu",
        dtype="float32",
        quantize="int8",
        max_model_len=1,
        kv_cache_tokens=2,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        block_size=3,
        max_num_seqs=4,
        max_rows=5,
        max_drafts=6,
        max_waiting=8,
        prefix_caching=False,
        drafter="none",
        draft_model="d",
        draft_overrides={"features": "after_norm"},
        draft_ranks="r.json",
        draft_depth=8,
        policy="fixed",
        chat_template="t.jinja",
        use_generation_config=False,
        threads=7,
        grammar_backend="llguidance",
    )
    assert engine_options(ModelOptions()) == Options()
    left_out = [one.name for one in fields(ModelOptions) if getattr(given, one.name) == one.default]
    assert left_out == [], "each is given, and none its default"


# generate


def test_generate_prints_the_same_text_for_the_same_seed_with_any_drafter(folder: str) -> None:
    common = ("generate", "abcabc", folder, "--dtype", "float32", "--seed", "3", "--max-tokens", "24")
    first = invoke(*common)
    assert first == invoke(*common, "--drafter", "none")
    assert first == invoke(*common, "--drafter", "ngram", "--max-drafts", "5", "--no-prefix-caching")
    assert first != invoke(*common[:-3], "4", *common[-2:])
    assert first.endswith("\n")


def test_generate_keeps_to_each_kind_of_constraint(folder: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    schema_file, grammar_file = tmp_path / "schema.json", tmp_path / "grammar.ebnf"
    schema_file.write_text(json.dumps(schema))
    grammar_file.write_text('root ::= "left" | "right"')
    common = ("generate", "abc", folder, "--seed", "1", "--max-tokens", "64")
    assert json.loads(invoke(*common, "--json-schema", json.dumps(schema)))["sure"] in (True, False)
    assert json.loads(invoke(*common, "--json-schema", str(schema_file)))["sure"] in (True, False)
    assert re.fullmatch(r"[a-c]{5}\n", invoke(*common, "--regex", "[a-c]{5}"))
    assert invoke(*common, "--choice", "yes", "--choice", "no") in ("yes\n", "no\n")
    assert invoke(*common, "--ebnf", str(grammar_file)) in ("left\n", "right\n")
    tag = {"type": "tag", "begin": "<x>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</x>"}
    grammar_file.write_text(json.dumps({"format": tag}))
    for given in (json.dumps({"format": tag}), str(grammar_file)):
        text = invoke(*common, "--structural-tag", given, "--whitespace", "compact")
        assert text in ('<x>{"sure":true}</x>\n', '<x>{"sure":false}</x>\n')


def test_a_text_cut_short_of_its_constraint_is_noted_on_stderr(folder: str) -> None:
    for command in (("generate", "x"), ("generate", "x", "--n", "2"), ("chat",)):
        arguments = [command[0], *command[1:2], folder, *command[2:], "--max-tokens", "2"]
        cut = CliRunner().invoke(app, [*arguments, "--regex", "a{50}"], input="hello\n", catch_exceptions=False)
        assert cut.exit_code == 0
        assert set(cut.stderr.splitlines()) == {
            "specdec: --regex: cut off at --max-tokens or the end of the context, so not complete"
        }
        free = CliRunner().invoke(app, arguments, input="hello\n", catch_exceptions=False)
        assert free.stderr == ""


def test_generate_reads_the_prompt_from_standard_input(folder: str) -> None:
    common = (folder, "--seed", "3", "--max-tokens", "8")
    assert invoke("generate", "-", *common, stdin="xyz") == invoke("generate", "xyz", *common)


def test_generate_gives_n_texts_with_their_seeds(folder: str) -> None:
    printed = invoke("generate", "abc", folder, "--n", "3", "--seed", "5", "--regex", "[a-z]{4}")
    found = re.findall(r"--- (\d), seed (\d+)\n([a-z]{4})\n", printed)
    assert [index for index, _, _ in found] == ["0", "1", "2"]
    again = invoke("generate", "abc", folder, "--seed", found[2][1], "--regex", "[a-z]{4}")
    assert again == found[2][2] + "\n"


# chat


def test_chat_answers_each_line_of_a_pipe(folder: str) -> None:
    common = ("chat", folder, "--seed", "1", "--regex", "[a-z]{6}")
    both = invoke(*common, stdin="one\n\ntwo\n")
    assert re.fullmatch(r"[a-z]{6}\n[a-z]{6}\n", both)
    first, second = both.split()
    assert invoke(*common, stdin="one\n/new\none\n").split() == [first, first]
    assert invoke(*common, stdin="two\n").split() != [second], "the second answer knows of the first turn"
    assert invoke(*common, stdin="one\n/exit\ntwo\n").split() == [first]
    assert invoke(*common, "--system", "be brief", stdin="one\n").split() != [first]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_chat_at_a_terminal_prompts_and_ctrl_c_stops_an_answer_but_not_the_chat(folder: str) -> None:
    import pty

    main_end, other_end = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "specdec",
        "chat",
        folder,
        "--seed",
        "1",
        "--drafter",
        "none",
        "--dtype",
        "float32",
    ]
    command += ["--regex", "[a-z]{700}", "--threads", "1"]
    with subprocess.Popen(
        command, stdin=other_end, stdout=other_end, stderr=other_end, env=ENVIRONMENT, start_new_session=True
    ) as process:
        os.close(other_end)

        def until(pattern: bytes) -> bytes:
            seen = b""
            while not re.search(pattern, seen):
                seen += os.read(main_end, 4096)
            return seen

        until(rb"> $")
        os.write(main_end, b"hello\n")
        until(rb"[a-z]{6}$")
        process.send_signal(signal.SIGINT)
        answer = re.sub(rb"[^a-z]", b"", until(rb"\r\n> $"))
        assert len(answer) < 690
        os.write(main_end, b"/exit\n")
        assert process.wait(timeout=60) == 0
    os.close(main_end)


# eval, bench, env


def test_eval_acceptance_writes_what_it_measured(folder: str, tmp_path: Path) -> None:
    data, out = tmp_path / "two.jsonl", tmp_path / "out.json"
    data.write_text("\n".join(DEFAULT_PROMPTS.read_text().splitlines()[4:6]))  # two under a schema
    printed = invoke(
        *("eval", "acceptance", folder, "--data", str(data), "--json", str(out), "--max-tokens", "40"),
        *("--temperature", "0.7", "--seed", "9", "--whitespace", "compact", "--drafter", "forced"),
    )
    found = json.loads(out.read_text())
    assert found["requests"] == found["equal_texts"] == 2
    assert found["first_differences"] == []
    assert found["tokens_per_forward"] > 1.0
    assert found["accepted_per_position"][0] > 0.0
    assert {"speedup", "categories", "prompts"} <= found.keys()
    assert (found["temperature"], found["seed"], found["data"]) == (0.7, 9, "two.jsonl")
    origin = found["provenance"]
    assert origin["options"]["drafter"] == "forced"
    assert origin["specdec"] == specdec.__version__
    assert re.fullmatch("[0-9a-f]{64}", origin["chat_template_sha256"])
    assert "json_fix" in printed
    assert "2 of 2" in printed


def test_eval_acceptance_can_give_its_report_to_a_pipe(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text('{"id": "a", "category": "b", "messages": [{"role": "user", "content": "hello"}]}')
    printed = invoke("eval", "acceptance", folder, "--data", str(data), "--max-tokens", "4", "--json", "-")
    assert json.loads(printed)["requests"] == 1


def test_eval_coupling_finds_what_the_formula_says(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--layers", "1", "--max-tokens", "12", "--draws", "40", "--drafter", "none", "--json", str(out))
    printed = invoke("eval", "coupling", folder, *options)
    found = json.loads(out.read_text())
    assert 12 < found["positions"] <= 12 * 20
    # Of independent draws at fixed positions, the variance is at most a quarter each.
    assert abs(found["coupled_exact"] - found["coupled_1"]) < 4 * (0.25 / (40 * found["positions"])) ** 0.5
    assert found["coupled_1"] <= found["coupled_2"] <= found["coupled_4"]
    assert found["coupled_exact"] <= found["rejection"]
    assert "first 1 of 2 layers" in printed


def test_eval_rank_accuracy_writes_what_shapes_trees(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    options = ("--max-tokens", "12", "--drafter", "layer_skip:1", "--policy", "fixed", "--draft-depth", "2")
    printed = invoke("eval", "rank-accuracy", folder, *options, "--json", str(out))
    found = json.loads(out.read_text())
    assert len(found["rank_accuracy"]) == len(found["draws"]) == 2
    assert found["draws"][0] > 100
    assert 0.0 < sum(found["rank_accuracy"][0]) <= 1.0
    assert "layer_skip, depth" in printed
    invoke("generate", "hi", folder, "--draft-ranks", str(out), *options)


def test_bench_decode_writes_what_it_measured(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = invoke(
        *("bench", "decode", folder, "--rows", "1,4", "--context", "64", "--rounds", "1"),
        *("--json", str(out), "--profile"),
    )
    found = json.loads(out.read_text())
    assert found["rows_ms"].keys() == {"1", "4"}
    assert found["prefill_tokens_per_s"] > 0
    assert found["provenance"]["threads"] >= 1
    options = found["provenance"]["options"]
    assert (options["max_drafts"], options["policy"]) == (3, "fixed"), "of what ran, not of what the user left open"
    assert "linears" in printed


def test_env_says_what_specdec_runs_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    facts = json.loads(invoke("env", "--json"))
    assert facts["specdec"] == specdec.__version__
    assert facts["cache_folder"] == str(tmp_path)
    assert facts["packages"]["torch"]
    assert facts["threads"] >= 1
    assert f"cache folder: {tmp_path}" in invoke("env")


# How it ends


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("pull", "no-such-model"), "no-such-model: no such file or folder"),
        (("generate", "x", "/nowhere/at/all"), "/nowhere/at/all: no such file"),
        (("generate", "x", "{tiny}", "--temperature", "-1"), "temperature: must be at least 0"),
        (("generate", "x", "{tiny}", "--max-model-len", "1m"), "max_model_len must be at most"),
        (("generate", "x", "{tiny}", "--drafter", "psychic"), "drafter 'psychic' is not known"),
        (("generate", "x", "{tiny}", "--generation-config", "some"), "--generation-config must be auto or none"),
        (("generate", "x", "{tiny}", "--regex", "("), "specdec: --regex: "),
        (("generate", "x", "{tiny}", "--json-schema", "{{]"), "specdec: --json-schema: must be JSON"),
        (
            ("generate", "x", "{tiny}", "--json-schema", "{list}"),
            "list.json: must be a JSON object or a boolean, got list",
        ),
        (("chat", "{tiny}", "--json-schema", '{{"type": "objekt"}}'), "specdec: --json-schema: "),
        (("generate", "x", "{tiny}", "--kv-cache-tokens", "2"), "kv_cache_tokens"),
        (("generate", "x", "{tiny}", "--json-schema", "none.json"), "none.json: cannot be read"),
        (("generate", "x", "{tiny}", "--json", "--regex", "a"), "--regex: constrains a text that --json"),
        (("chat", "{bare}"), "messages: the model has no chat template"),
        (("eval", "acceptance", "{tiny}", "--data", "none.jsonl"), "none.jsonl: cannot be read"),
        (("eval", "coupling", "{tiny}", "--layers", "1", "--temperature", "0"), "temperature must be 1e-05 or more"),
        (("eval", "coupling", "{tiny}", "--layers", "1", "--temperature", "1e-30"), "must be 1e-05 or more, got 1e-30"),
        (("eval", "coupling", "{tiny}", "--layers", "3"), "layers must be between 1 and the model's 2, got 3"),
        (("eval", "rank-accuracy", "{tiny}", "--drafter", "suffix"), "0 run here"),
        (("generate", "a", "{tiny}", "--draft-overrides", "{{"), "--draft-overrides must be a JSON object"),
        (("generate", "a", "{tiny}", "--draft-overrides", "[1]"), "--draft-overrides must be a JSON object, got '[1]'"),
        (("bench", "decode", "{tiny}", "--context", "9"), "context must be above"),
        (("serve", "{tiny}", "--port", "70000"), "port must be between 0 and 65535"),
    ],
)
def test_what_a_user_did_wrong_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    complaint: str,
    folder: str,
    bare_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from specdec.cli import main

    (tmp_path / "list.json").write_text("[1, 2]")
    files = {"tiny": folder, "bare": bare_folder, "list": str(tmp_path / "list.json")}
    filled = [argument.format(**files) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec", *filled])
        patch.setattr(sys, "stdin", io.StringIO("hello\n"))
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdec: ")]
    assert len(errors) == 1
    assert complaint in errors[0]


def test_the_version_can_be_asked_for() -> None:
    assert invoke("--version") == f"specdec {specdec.__version__}\n"


def test_no_traceback_reaches_a_user() -> None:
    result = specdec_process("generate", "x", "/nowhere/at/all")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("specdec: /nowhere/at/all: ")


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom specdec.cli import main\nsys.argv = ['specdec', 'generate', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('heavy:', *sorted({'torch', 'numpy', 'fastapi', 'rich.progress', 'specdec.build'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=ROOT
    )
    assert "--json-schema" in result.stdout
    assert result.stdout.splitlines()[-1] == "heavy:"


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Processes started meanwhile get Ctrl-C: what a shell runs in the background inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
def test_ctrl_c_ends_with_130_and_no_traceback(folder: str) -> None:
    command = [sys.executable, "-m", "specdec", "generate", "x", folder, "--max-tokens", "900", "--seed", "2"]
    command += ["--regex", "[a-z]{900}", "--drafter", "none"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()


@pytest.fixture
def server(folder: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, with a key, and its address."""
    command = [sys.executable, "-m", "specdec", "serve", folder, "--port", "0", "--served-model-name", "tiny"]
    environment = ENVIRONMENT | {"SPECDEC_API_KEY": "k1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, "the server ended before it listened"
            address = re.search(r"http://127\.0\.0\.1:\d+", line)
        yield process, address[0]
        process.kill()


def test_serve_answers_and_ends_at_sigterm(server: tuple[subprocess.Popen[str], str]) -> None:
    process, address = server
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 3}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer k1"}
    request = urllib.request.Request(f"{address}/v1/completions", body, headers)
    for attempt in range(50):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
            break
        except urllib.error.URLError:
            assert attempt < 49, "the server listens but does not answer"
            time.sleep(0.1)
    assert answer["usage"]["completion_tokens"] <= 3
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{address}/v1/models"), timeout=60)
    assert refused.value.code == 401
    refused.value.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
