"""The script that checks and times kernels on a GPU: rehearsed in the interpreter; with sections that crash, hang and
take long; and on a GPU that only notes what is launched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: it comes with the extra `gpu`, on Linux")

ALL = [
    *("machine", "engine", "drafters", "steps", "noise", "mask", "penalties", "biases", "draw", "guesses"),
    *("fronts", "logprobs", "drawing", "norm", "rotary", "activation", "attention", "kv"),
]
# What the package needs besides torch, triton, numpy and safetensors.
OTHERS = (
    *("tokenizers", "jinja2", "llguidance", "jsonschema_rs", "fastapi", "uvicorn", "pydantic", "typer", "rich"),
    *("prometheus_client", "huggingface_hub", "gguf", "xgrammar", "outlines_core"),
)
SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "gpu_check"


def rehearse(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    """The script's end and the sections of its JSON, run in a folder that is not the repository."""
    command = [sys.executable, str(SCRIPT), "--rehearse", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1300)
    print(result.stdout, result.stderr)
    report = json.loads((folder / "gpu_check.json").read_text())
    assert report["rehearsal"] is True
    return result, report["sections"]


def test_a_python_without_what_it_needs_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-S", str(SCRIPT), "machine"]  # without packages
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"{sys.executable} has no torch, triton, numpy, safetensors: name a Python that has" in result.stderr


@pytest.mark.parametrize(
    "names",
    [
        ["machine", "mask"],
        ["machine", "attention", "kv"],
        pytest.param(ALL, marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_checks_and_times_every_kernel_and_ends_with_one_table(names: list[str], tmp_path: Path) -> None:
    result, sections = rehearse(tmp_path, "--seconds", "1200", *(names if names is not ALL else []))
    assert result.returncode == 0
    assert list(sections) == names
    lines = result.stdout.splitlines()
    assert lines[-len(names) :] == [f"{name}: passes, {sections[name]['checks']} checks" for name in names]
    head = next(place for place, line in enumerate(lines) if line.split() == ["kernel", "us", "floor", "us", "ratio"])
    times = [found for section in sections.values() for found in section["times"]]  # type: ignore[attr-defined]
    assert len(times) == len(lines) - len(names) - head - 1 >= 2
    for found, line in zip(times, lines[head + 1 :], strict=False):
        assert line.startswith(found["name"])
        assert found["seconds"] > 0
        assert found["num_bytes"] > 0


# Sections in the place of the script's own, for it and the processes that it starts.
STAND_IN = """
import importlib.machinery, importlib.util, os, signal, sys, time

loader = importlib.machinery.SourceFileLoader("gpu_check", {script!r})
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
sys.modules["gpu_check"] = script
loader.exec_module(script)


def good(place, cases, found):
    for number in range(3):
        if cases.checking(f"good {{number}}"):
            found.check(True, "")
            found.count("good ones", 1)
            found.largest("the largest", number)
    if cases.timing("a time"):
        found.times.append(script.Time("a time", place.seconds([lambda: time.sleep(0.01)]), 9))


def crashing(place, cases, found):
    for number in range(4):
        if cases.checking(f"crashing {{number}}"):
            found.check(number != 3, "three is not right")
            if number == 1:
                print("about to be killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2:
                raise RuntimeError("two fails")


def slow(place, cases, found):
    for number in range(100):
        if cases.checking(f"slow {{number}}"):
            found.check(True, "")
            time.sleep(1.0)


def hanging(place, cases, found):
    if cases.checking("hanging"):
        time.sleep(1000)


def losing(place, cases, found):
    if cases.checking("losing the device"):
        global lost
        lost = True
        raise RuntimeError("the device is lost")
    for number in range(2):
        if cases.checking(f"after it {{number}}"):
            found.check(not lost, "there is no device")


def silent(place, cases, found):
    if cases.checking("silent"):
        print("about to hang in the driver", file=sys.stderr, flush=True)
        os.closerange(3, 99)
        time.sleep(1000)


lost = False
script.SECTIONS = dict(good=good, crashing=crashing, slow=slow, hanging=hanging, losing=losing, silent=silent)
script.is_of_use = lambda place: not lost
script.LAST_SECONDS = 1.0
script.REHEARSAL = script.replace(script.REHEARSAL, longest=3.0)
sys.exit(script.main())
"""


def stand_in(folder: Path) -> list[str]:
    """How to run the script with these sections."""
    program = folder / "stand_in.py"
    program.write_text(STAND_IN.format(script=str(SCRIPT)))
    return [sys.executable, str(program), "--rehearse"]


def test_a_case_that_kills_its_process_or_hangs_is_reported_and_takes_no_other_with_it(tmp_path: Path) -> None:
    command = [*stand_in(tmp_path), "--jobs", "2", "hanging", "crashing", "good"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1, result.stderr
    assert "crashing, crashing 1: its process ended with status -9: about to be killed" in result.stdout
    assert "RuntimeError: two fails" in result.stdout
    assert "crashing, crashing 3: three is not right" in result.stdout
    assert "hanging, hanging: ran past 3.0 s" in result.stdout
    ends = ["hanging: fails, 0 checks", "crashing: fails, 3 checks", "good: passes, 3 checks"]
    assert result.stdout.splitlines()[-3:] == ends
    assert "good ones: 3" in result.stdout
    assert "the largest: 2" in result.stdout
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert [(found["done"], found["cases"]) for found in sections.values()] == [(1, 1), (4, 4), (4, 4)]
    assert [found["name"] for found in sections["good"]["times"]] == ["a time"]


@pytest.mark.slow
def test_what_there_is_no_time_for_is_cut_and_said_to_be(tmp_path: Path) -> None:
    command = [*stand_in(tmp_path), "--jobs", "1", "--seconds", "20", "good", "slow"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 3, result.stderr
    good, slow = result.stdout.splitlines()[-2:]
    assert re.fullmatch("good: (passes|cut after 3 of 4 cases), 3 checks", good)  # it is timed if there is time left
    found = re.fullmatch(r"slow: cut after (\d+) of 100 cases, (\d+) checks", slow)
    assert found, result.stdout
    assert found[1] == found[2]
    assert 0 < int(found[1]) < 20


def test_where_no_process_starts_in_time_everything_is_cut(tmp_path: Path) -> None:
    result, sections = rehearse(tmp_path, "--seconds", "0.2", "mask", "draw")
    assert result.returncode == 1
    assert [(section["done"], section["cases"], section["checks"]) for section in sections.values()] == [(0, 0, 0)] * 2
    assert "nothing can be checked: ran past 0.2 s" in result.stdout
    assert result.stdout.splitlines()[-2:] == ["mask: cut, 0 checks", "draw: cut, 0 checks"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_ended_from_outside_leaves_what_it_found(number: signal.Signals, tmp_path: Path) -> None:
    """And blames no case for it; a terminal interrupts all of its processes at once."""
    command = [*stand_in(tmp_path), "--jobs", "1", "good", "slow"]
    started = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    path, end = tmp_path / "gpu_check.json", time.monotonic() + 150
    while time.monotonic() < end and not (path.exists() and '"checks": 3' in path.read_text()):
        time.sleep(0.1)
    os.killpg(started.pid, number)
    told, _ = started.communicate(timeout=60)
    assert started.returncode == 128 + number
    sections = json.loads(path.read_text())["sections"]
    assert sections["good"]["done"] == sections["good"]["checks"] == 3
    assert [found["failures"] for found in sections.values()] == [[], []]
    assert told.splitlines()[-2] == "good: cut after 3 of 4 cases, 3 checks"


def test_where_a_case_loses_the_device_a_new_process_takes_the_next(tmp_path: Path) -> None:
    command = [*stand_in(tmp_path), "--jobs", "1", "losing", "silent"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1, result.stderr
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    (failure,) = sections["losing"]["failures"]
    assert "RuntimeError: the device is lost" in failure
    assert sections["losing"]["checks"] == 2
    (failure,) = sections["silent"]["failures"]
    assert failure == "its process says no more and does not end: about to hang in the driver"


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    command = [*stand_in(tmp_path), "--json", str(tmp_path / "nowhere" / "found.json"), "good"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2
    assert "nowhere/found.json cannot be written: " in result.stderr


WARM = """
import importlib.machinery, importlib.util, sys

from tests.fake_gpu import fake_gpu

loader = importlib.machinery.SourceFileLoader("gpu_check", sys.argv[1])
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
sys.modules["gpu_check"] = script
loader.exec_module(script)
with fake_gpu() as launches:
    for name in sys.argv[2:] or script.SECTIONS:
        launches.asked.clear()
        cases = script.Cases()
        script.SECTIONS[name](script.GPU, cases, script.Findings())
        assert not launches.asked, f"{name} launches before a case is chosen"
        for number, (kind, _) in enumerate(cases.names):
            if kind != script.COLD:
                script.found_by(name, number, script.replace(script.GPU, warming=kind == script.TIME))
        known = set(launches.asked)
        for number, (kind, what) in enumerate(cases.names):
            if kind != script.CHECK:
                found = script.found_by(name, number, script.GPU)
                assert (found.times or name == "machine") and not found.failures, (what, found.failures)
        print(name, len(cases.names), len(known), *sorted(launches.asked - known))
"""


@pytest.mark.parametrize(
    "names", [["noise", "attention", "kv"], pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_all_that_is_timed_was_compiled_by_the_checks(names: list[str]) -> None:
    """Nothing is compiled while one process has the GPU for itself. With the real shapes, on one that runs nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WARM, str(SCRIPT), *(names if names is not ALL else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    lines = [line.split(" ", 3) for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == names
    assert [line for line in lines if len(line) > 3] == []
    assert sum(int(kernels) for _, _, kernels, *_ in lines) > (400 if names is ALL else 50)


def test_a_section_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "masks"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert f"sections ['masks'] are unknown; there are {', '.join(ALL)}" in result.stderr


def test_all_that_the_script_imports_needs_no_other_package() -> None:
    modules = sorted(set(re.findall(r"from (specdec[\w.]*) import", SCRIPT.read_text(encoding="utf-8"))))
    assert "specdec.engine" in modules
    program = f"""
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {OTHERS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Only())
for module in {modules!r}:
    __import__(module)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
