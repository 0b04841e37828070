"""The demo on the default model's real weights: what `specdec demo` promises."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from specdec.build import DEFAULT_MODEL, Options
from specdec.evals.demo import CORRECTION, FIELD, RECORD, prompts, run_demo
from specdec.llm import LLM

pytestmark = [pytest.mark.weights, pytest.mark.slow]


def test_the_record_is_corrected_with_the_same_text_and_fewer_forwards() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    llm = LLM(DEFAULT_MODEL, Options(device="cpu", dtype="float32", max_model_len=1024))
    record, ordinary = run_demo(llm, console)
    drafted = record.pair.drafted
    assert json.loads(drafted.text) == RECORD | {FIELD: CORRECTION}
    assert len(drafted.tokens) >= 30
    assert record.difference is None or record.difference.gap < 1e-3
    assert ordinary.difference is None or ordinary.difference.gap < 1e-3
    assert len(drafted.tokens) / drafted.acceptance.draws > 3.0
    printed = console.export_text()
    assert '"customer_name": "Mara Lind"' in printed
    assert "tokens/s with drafts" in printed
    assert prompts()[1].id in printed
