"""Logits against transformers: whole prompts, every split, ragged batches, decode, aux hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparkdraft.kernels import native
from tests.models.harness import Harness
from tests.models.tiny import VARIANTS, TinyOf, oracle, oracle_logits, write_tiny

PLACES = [
    pytest.param(("reference", "cpu"), id="cpu"),
    pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
]
TOLERANCE = 1e-4


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tiny_of: TinyOf) -> Path:
    return tiny_of(request.param)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param[1] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return request.param


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_whole_prompt(folder: Path, place: tuple[str, str]) -> None:
    prompt = ids(100)
    logits, _ = Harness(folder, *place).run({"a": prompt})
    close(logits["a"], oracle_logits(folder, prompt))


def test_every_split_of_a_prompt(folder: Path, place: tuple[str, str]) -> None:
    prompt = ids(21)
    expected = oracle_logits(folder, prompt)
    harness = Harness(folder, *place)
    for cut in range(1, len(prompt)):
        first, _ = harness.run({f"{cut}": prompt[:cut]})
        second, _ = harness.run({f"{cut}": prompt[cut:]})
        close(torch.cat((first[f"{cut}"], second[f"{cut}"])), expected)
        harness.free += harness.tables.pop(f"{cut}")


def test_ragged_batch_of_chunks_and_decode_rows(folder: Path, place: tuple[str, str]) -> None:
    prompts = {"a": ids(50, 1), "b": ids(9, 2), "c": ids(33, 3), "d": ids(1, 4)}
    expected = {name: oracle_logits(folder, prompt) for name, prompt in prompts.items()}
    harness = Harness(folder, *place)
    sizes = {"a": [30, 17, 1, 1, 1], "b": [8, 1], "c": [1, 15, 16, 1], "d": [1]}
    done = dict.fromkeys(prompts, 0)
    while any(sizes.values()):
        chunks = {n: prompts[n][done[n] : done[n] + sizes[n].pop(0)] for n in prompts if sizes[n]}
        logits, _ = harness.run(chunks)
        for name, chunk in chunks.items():
            close(logits[name], expected[name][done[name] : done[name] + len(chunk)])
            done[name] += len(chunk)


def test_taps_are_the_residual_after_the_named_blocks(folder: Path, place: tuple[str, str]) -> None:
    prompt = ids(12)
    _, aux_hidden = Harness(folder, *place).run({"a": prompt}, aux_layers=(1, 0))
    with torch.inference_mode():
        states = oracle(folder)(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    close(aux_hidden[:, 0], states[2][0])
    close(aux_hidden[:, 1], states[1][0])


# Widths that are no multiples of 32 stay floats on the CPU's own kernels, so these can be held to the same oracle.
ODD = {"hidden_size": 68, "intermediate_size": 100, "head_dim": 20}
ODDER: dict[str, dict[str, int]] = {
    "qwen3_moe": {"moe_intermediate_size": 36},
    "gpt_oss": {"intermediate_size": 72},
    "gemma4": {"global_head_dim": 44},
    "gemma4-experts": {"moe_intermediate_size": 36, "global_head_dim": 44},
}


@pytest.mark.skipif(native.unavailable_reason() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("variant", ["qwen2-windows", "qwen3-windows", "mistral", "phi3", "gemma3", *ODDER])
def test_the_kernels_of_a_cpu(variant: str, tmp_path: Path) -> None:
    folder, prompt = write_tiny(tmp_path, variant, **(ODD | ODDER.get(variant, {}))), ids(40)
    harness = Harness(folder, "native")
    chunks = [prompt[:25], prompt[25:36], *([token] for token in prompt[36:])]
    parts = [harness.run({"a": chunk})[0]["a"] for chunk in chunks]
    close(torch.cat(parts), oracle_logits(folder, prompt))
