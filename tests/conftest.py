"""What every test may ask for: tiny checkpoints, the embedded model's file, and a writer of tiny GGUF files.

Fetching goes through the package's own code into the cache that SPARKDRAFT_CACHE names, so the tests exercise what a
user runs first; the writer is llama.cpp's own, so that reader and writer are never wrong together. Toy models and
drafters lie in tests/fakes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkdraft.engine import profile
from sparkdraft.weights import hub
from tests.models.tiny import TinyOf, write_tiny

LLAMA = {
    "context_length": 64,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def pytest_configure() -> None:
    """Of several processes that run tests at once each keeps to its own cores: threads that wait for one another across
    processes take up to four times as long as half as many."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[int(worker.removeprefix("gw")) % len(cores) :: count]
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))  # else more threads than cores wait for one another, 13 times as long


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason for which tests were skipped; failures come after it, last."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:,} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The profiles that a developer has tuned for this machine do not change what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "folder", lambda: tmp_path_factory.getbasetemp() / "no-profiles")
        yield


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real times of steps are not learnt, so whether a request drafts does not depend on how busy the machine is. An
    engine that learns no time drafts, until a test tells its budget what steps cost."""
    monkeypatch.setattr("sparkdraft.engine.drafting.Drafting.timed", lambda *_, **__: None)


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> TinyOf:
    """tiny_of(variant, **changes): the folder of a tiny random checkpoint, written once; no test changes it."""

    @cache
    def folder(variant: str, **changes: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp(variant) / "tiny-model", variant, **changes)

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_of: TinyOf) -> Path:
    return tiny_of("llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_of: TinyOf) -> Path:
    return tiny_of("qwen3")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return hub.fetch("smollm2")


@pytest.fixture(scope="session")
def smollm2_reader(smollm2_path: Path) -> Any:
    """The same file in llama.cpp's own reader, which takes four seconds to open it."""
    from gguf import GGUFReader

    return GGUFReader(smollm2_path)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """write_gguf(path, arch, settings, tensors): settings over LLAMA's, a tensor is an array or (bytes, ggml type)."""
    from gguf import GGUFWriter

    def write(path: Path, arch: str = "llama", settings: Any = None, tensors: Any = None) -> Path:
        writer = GGUFWriter(path, arch)
        values = {"general.name": "tiny"} | {f"{arch}.{key}": value for key, value in LLAMA.items()}
        for key, value in (values | (settings or {})).items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            else:
                adders: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
                adders[type(value)](key, value)
        for name, value in ({"token_embd.weight": np.zeros((8, 64), np.float32)} | (tensors or {})).items():
            if isinstance(value, tuple):
                writer.add_tensor(name, value[0], raw_dtype=value[1])
            else:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
