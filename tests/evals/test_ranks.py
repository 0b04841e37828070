"""Rank accuracy is that of the prompts at hand."""

from __future__ import annotations

from pathlib import Path

from specdec.build import Options
from specdec.evals.prompts import EvalPrompt
from specdec.evals.ranks import measure
from specdec.llm import LLM
from specdec.request import Sampling, Stopping
from tests.server.conftest import write_model


def test_what_was_guessed_before_does_not_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    llm = LLM(str(folder), Options(drafter="layer_skip:1", policy="fixed", threads=1, max_model_len=128))
    prompts = [EvalPrompt("a", "a", ({"role": "user", "content": "ab"},))]
    sampling, stopping = Sampling(temperature=0.0), Stopping(max_tokens=12, ignore_eos=True)
    first = measure(llm, prompts, sampling, stopping)
    assert sum(first["draws"]) > 0
    assert sum(measure(llm, prompts, sampling, stopping)["draws"]) <= 12
    assert sum(measure(llm, prompts, sampling, stopping)["draws"]) <= 12
