"""Where a number comes from: of the model that gave it, whatever else the machine has."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.build import Options, build
from specdec.evals.provenance import machine, provenance, tokenizer_provenance
from tests.server.conftest import write_model


def test_a_report_names_the_device_that_the_model_ran_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = Options(device="cpu", dtype="float32", policy="fixed", max_drafts=3)
    loaded = build(str(write_model(tmp_path / "tiny")), options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    assert machine()["device"] == "some GPU"
    assert provenance(loaded)["device"] == tokenizer_provenance("byte")["device"] == "cpu"
    assert provenance(replace(loaded, device="cuda"))["device"] == "some GPU"
    assert provenance(loaded)["options"]["max_drafts"] == 3
