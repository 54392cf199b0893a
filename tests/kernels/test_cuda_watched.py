"""Whole engines with the GPU's kernels: what they launch is seen, and tiles are looked up as facts tell."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from sparkdraft import LLM, kernels
from sparkdraft.engine.facts import asked
from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.facts import tile_keys
from tests.kernels import watching
from tests.kernels.triton_device import DEVICE, INTERPRET, gpu
from tests.models.tiny import write_tiny


@gpu
@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_5"])
def test_launches_are_seen_and_look_up_what_is_told(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRET:  # the engine would not run these kernels on a CPU
        monkeypatch.setattr(kernels, "load", lambda _: cuda)
        see = watching.watching
        monkeypatch.setattr(watching, "watching", lambda model, _: see(model, "cuda"))
    seen: set[tuned.Key] = set()
    find = tuned.find
    monkeypatch.setattr(tuned, "find", lambda target, key: (seen.add(key), find(target, key))[1])
    monkeypatch.setattr("sparkdraft.engine.engine.Engine.warm_up", lambda _: None)  # too long for the interpreter
    folder, dtype = str(write_tiny(tmp_path / variant, variant)), "float32" if INTERPRET else "bfloat16"
    llm = LLM(folder, device=DEVICE, dtype=dtype, spec="off", ngram=False, max_model_len=64, kv_tokens=128)
    told = {key for keys in tile_keys(asked(llm.engine.runner.model, llm.plan)).values() for key in keys}
    prompt, row = watching.run_watched(llm.engine, 20)  # more than the kernels for few rows take
    assert seen and seen <= told, seen - told
    for number in range(len(llm.model_config.layers)):
        names, tiles = zip(*row.of(number), strict=True)
        assert "_attend" in names or "_delta_rule" in names, names
        assert any(tiles) and prompt.of(number)
