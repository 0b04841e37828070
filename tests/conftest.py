"""Tests that need real weights run unless SPECDEC_TEST_WEIGHTS=0 says that none can be had."""

import os

# Tiny models gain nothing from a second thread, and lose much where other work runs beside the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels run as NumPy programs where there is no GPU; it is decided when they are imported. What is to be compiled runs
# in a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("SPECDEC_TEST_WEIGHTS", "1") != "0":
        return
    skip = pytest.mark.skip(reason="SPECDEC_TEST_WEIGHTS=0: tests on real weights are switched off")
    for item in items:
        if "weights" in item.keywords:
            item.add_marker(skip)
