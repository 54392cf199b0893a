"""Codes captured beside an exact cache: they change no text, and their reported errors are true."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.cache.formats.turboquant import CaptureKV, TurboQuantKV
from sparkdraft.cli.generate import coding_line
from sparkdraft.core import SamplingParams
from sparkdraft.engine.backend import EngineBackend
from sparkdraft.engine.load import Loaded
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.turboquant.vectors import VectorFormat
from sparkdraft.llm import LLM
from sparkdraft.models.common.layers import AttentionSpec, RopeSpec
from sparkdraft.server.engine_process import EngineLoop
from sparkdraft.server.metrics import Metrics
from tests.models.tiny import write_tiny

CAPTURE = {"kv": "turboquant", "tq_mode": "capture_only"}
CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 4, 2, 64, 8, 16


@pytest.fixture(scope="module")
def options(device: str) -> dict[str, Any]:
    # Chunks of a prompt that follow the clock would change the last bits of float32.
    rows = {"max_step_tokens": 40, "max_step_ms": 3_600_000}
    return {"device": device, "dtype": "float32", "max_model_len": 256, "max_seqs": 3, **rows}


@pytest.fixture(scope="module")
def captured(wide_tiny: Path, options: dict[str, Any]) -> LLM:
    return LLM(str(wide_tiny), **options, **CAPTURE, kv_tokens=400)


@pytest.mark.slow
def test_the_text_is_that_of_an_exact_cache(wide_tiny: Path, options: dict[str, Any], captured: LLM) -> None:
    """To the bit on a CPU. On a GPU a prompt's chunks follow the clock, and float32's last bits follow the chunks."""
    rng = random.Random(5)
    asked = [[rng.randrange(3, 259) for _ in range(rng.randint(1, 50))] + [9, 17, 30] * 8 for _ in range(3)]
    bias = dict.fromkeys((9, 17, 30, 40, 50, 60), 100.0)  # it writes few ids, so that drafts come, right and wrong
    exact = LLM(str(wide_tiny), **options, kv_tokens=400)
    forms: tuple[dict[str, Any], ...] = ({"num_draft": 7, "logit_bias": bias, "logprobs": 1}, {"num_draft": 0})
    for form in forms:
        params = SamplingParams(max_tokens=32, ignore_eos=True, **form)
        for _ in range(2):  # the second time prefixes are found
            wanted, found = ([r.completions[0] for r in m.generate(asked, params)] for m in (exact, captured))
            assert [c.ids for c in found] == [c.ids for c in wanted]
            ours, theirs = ([t.logprob for c in some for t in c.logprobs or ()] for some in (found, wanted))
            assert ours == (theirs if options["device"] == "cpu" else pytest.approx(theirs, abs=1e-4))
        assert any(c.num_cached for c in found)
        drafts = [c.speculation for c in found if c.speculation]
        accepted, drafted = (sum(s[f"num_{what}draft_tokens"] for s in drafts) for what in ("accepted_", ""))
        assert 0 < accepted < drafted or not form["num_draft"], "some drafts are rejected, and written over"
    assert exact.kv_errors() is None


def test_rows_are_counted_once_and_none_of_the_warm_up(captured: LLM) -> None:
    captured.engine.reset_counts()
    assert captured.kv_errors()["rows"] == 0 and captured.kv_errors()["key_error"] == 0
    prompt = [*range(100, 150)]
    captured.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True, num_draft=0))
    errors = captured.kv_errors()
    ahead = errors["rows"] - (len(prompt) + 7)  # a GPU has begun the next step when the host reads the last
    assert 0 <= ahead <= (captured.engine.plan.device == "cuda") and len(errors["layers"]) == 3
    assert 0.08 < errors["key_error"] < 0.11 and 0.16 < errors["value_error"] < 0.21, "what 4 and 3 bits can do"
    for name in ("key_error", "value_error", "attention_error"):
        layers = [layer[name] for layer in errors["layers"]]
        assert errors[name] == pytest.approx(math.sqrt(sum(e * e for e in layers) / 3))


def test_errors_reach_the_status_the_metrics_and_the_command_line(captured: LLM) -> None:
    captured.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    loaded = Loaded(captured.checkpoint, captured.model_config, captured.tokenizer, captured.engine)
    loop = EngineLoop(EngineBackend(loaded, "tiny"), SimpleNamespace())  # type: ignore[arg-type]
    errors = json.loads(json.dumps(loop._status()))["kv_errors"]
    assert errors == captured.kv_errors()
    metrics = Metrics()
    assert 'layer="' not in metrics.render()
    metrics.coding(errors)
    lines = metrics.render().splitlines()
    assert f"sparkdraft_kv_cache_captured_rows {errors['rows']}" in lines
    for name in ("key_error", "value_error", "attention_error"):
        for layer in range(3):
            assert f'sparkdraft_kv_cache_{name}{{layer="{layer}"}} {errors["layers"][layer][name]!r}' in lines
    said = coding_line(errors)
    assert f"keys would be off by {errors['key_error']:.1%}" in said and f"over {errors['rows']} rows" in said


def test_layers_have_the_models_numbers(tmp_path: Path) -> None:
    """Layers with a window are not coded, so those that are do not follow each other."""
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_tokens": 1024, "spec": "off", "ngram": False}
    llm = LLM(str(write_tiny(tmp_path, "gemma4")), **options, **CAPTURE)
    llm.generate([[*range(3, 40)]], SamplingParams(2, ignore_eos=True))
    full = [i for i, spec in enumerate(llm.model_config.attention) if not spec.window]
    errors = llm.kv_errors()
    assert errors and [found["layer"] for found in errors["layers"]] == full != [*range(len(full))]
    assert any(f"most in layer {i}:" in coding_line(errors) for i in full)


# ---- the numbers themselves


def cache(
    key_bits: int, value_bits: int, centre: Tensor | None, device: torch.device = CPU, ops: Any = reference
) -> CaptureKV:
    layer, centres = AttentionSpec(HEADS, KV_HEADS, DIM, RopeSpec(DIM), DIM**-0.5), None if centre is None else [centre]
    exact = DenseKV([layer], BLOCKS, SIZE, torch.float32, device, ops)
    coded = TurboQuantKV([key_bits], value_bits, [layer], BLOCKS, SIZE, (0, 0, 0), centres, device, ops)
    return CaptureKV(exact, coded, [0], device)


def step(kv: CaptureKV, qkv: Tensor, positions: Tensor, slots: Tensor, view: AttentionView) -> Tensor:
    """Write as a layer does; returns the rotated queries."""
    angle = torch.arange(256, device=qkv.device).unsqueeze(1) * 100 ** -torch.linspace(0, 1, DIM // 2).to(qkv.device)
    rope = torch.cat((angle.cos(), angle.sin()), dim=1)
    kv.layers[0].write(qkv, RopeArgs(positions.int(), rope, HEADS, KV_HEADS, None, None, 1e-6), slots.int())
    q = qkv.view(len(qkv), -1, DIM)[:, :HEADS]
    kv.layers[0].attend(q, view, AttentionParams(DIM**-0.5))
    return q


def measured(key_bits: int, value_bits: int, centred: bool = True) -> tuple[dict[str, float], dict[str, float]]:
    """A text in three steps with padding in each: what the cache reports, and the same in float64."""
    torch.manual_seed(3)
    centre = torch.randn(KV_HEADS, DIM) if centred else None
    kv, rows = cache(key_bits, value_bits, centre), 90
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
    blocks = torch.randperm(BLOCKS)
    slots = blocks[torch.arange(rows) // SIZE] * SIZE + torch.arange(rows) % SIZE
    queries = []
    for start, stop in ((0, 50), (50, 89), (89, 90)):
        padded = torch.cat((qkv[start:stop], torch.full((3, qkv.shape[1]), torch.nan)))
        places, positions = torch.full((len(padded),), -1), torch.zeros(len(padded))
        places[:-3], positions[:-3] = slots[start:stop], torch.arange(start, stop)
        ends, context = (torch.tensor(n, dtype=torch.int32) for n in ([0, stop - start], [stop]))
        view = AttentionView(ends, context, blocks.int().unsqueeze(0), stop - start, stop)
        queries.append(step(kv, padded, positions, places, view)[:-3])
    errors = kv.meter.errors()
    assert errors.pop("rows") == rows and errors.pop("layers") == [{"layer": 0, **errors}]
    k, v = (x[0][slots // SIZE, :, slots % SIZE].double() for x in (kv.exact.k, kv.exact.v))
    return errors, in_float64(torch.cat(queries).double(), k, v, centre, key_bits, value_bits)


def in_float64(
    q: Tensor, k: Tensor, v: Tensor, centre: Tensor | None, key_bits: int, value_bits: int
) -> dict[str, float]:
    taken = torch.zeros(KV_HEADS, DIM).double() if centre is None else centre.double()
    coded = []
    for x, bits in ((k - taken, key_bits), (v, value_bits)):
        fmt = VectorFormat(DIM, bits)
        coded.append(fmt.decode(fmt.encode(x), dtype=torch.float64))
    exact, by_codes = attended(q, k, v), attended(q, coded[0] + taken, coded[1])
    pairs = zip(("key_error", "value_error", "attention_error"), (*coded, by_codes), (k - taken, v, exact), strict=True)
    return {name: float((got - wanted).norm() / wanted.norm()) for name, got, wanted in pairs}


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = HEADS // KV_HEADS
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * DIM**-0.5
    unseen = torch.ones_like(scores[0]).triu(1).bool()
    return torch.einsum(
        "hij,jhd->ihd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v.repeat_interleave(group, 1)
    )


@pytest.mark.parametrize("centred", [True, False])
def test_errors_are_those_of_float64_and_padding_counts_nothing(centred: bool) -> None:
    found, wanted = measured(4, 3, centred)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_fewer_bits_err_more() -> None:
    (few, _), (mixed, _), (many, _) = measured(2, 2), measured(2, 5), measured(5, 5)
    assert few["key_error"] == mixed["key_error"] > 5 * many["key_error"]
    assert few["value_error"] > 5 * mixed["value_error"] == 5 * many["value_error"]
    assert few["attention_error"] > mixed["attention_error"] > many["attention_error"]


def test_a_step_of_padding_alone_and_what_is_forgotten() -> None:
    kv, none = cache(4, 3, None), torch.full((4,), -1)
    view = AttentionView(*(torch.zeros(n, dtype=torch.int32) for n in (2, 1)), torch.zeros(1, 1).int(), 4, 0)
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * DIM)
    step(kv, qkv, torch.zeros(4), none, view)
    nothing = {"rows": 0, "key_error": 0, "value_error": 0, "attention_error": 0}
    assert {name: kv.meter.errors()[name] for name in nothing} == nothing
    step(kv, qkv, torch.zeros(4), torch.arange(4), view)
    assert kv.meter.errors()["rows"] == 4 and kv.meter.errors()["key_error"] > 0
    kv.meter.forget()
    assert {name: kv.meter.errors()[name] for name in nothing} == nothing
    assert kv.bytes_per_token == KV_HEADS * DIM * 2 * 4 + KV_HEADS * (34 + 26)


def test_nothing_of_a_step_waits_for_the_device() -> None:
    """On the meta device, which has no numbers: anything that would bring one to the host, and so end a recording,
    fails."""
    meta = torch.device("meta")

    def nothing(*_: Any) -> None: ...

    def mixed(*_: Any) -> Tensor:
        return torch.empty(4, HEADS * DIM, device=meta)

    ops = SimpleNamespace(**dict.fromkeys(("rope_write", "tq_rope_write"), nothing))
    ops.paged_attention = ops.tq_attention = mixed
    kv = cache(5, 3, torch.randn(KV_HEADS, DIM, device=meta), meta, ops)
    qkv, slots = torch.randn(4, (HEADS + 2 * KV_HEADS) * DIM, device=meta), torch.zeros(4, device=meta)
    view = AttentionView(slots, slots, slots, 4, 4)
    step(kv, qkv, slots, slots, view)
    with pytest.raises((NotImplementedError, RuntimeError)):
        kv.meter.errors()
