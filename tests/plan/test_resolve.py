"""Plans for machines that are not this one: what auto becomes, what is refused, and that the sums add up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparkdraft
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.sampler import EditTables
from sparkdraft.engine.slots import Slots
from sparkdraft.models.common.sizes import kv_bytes_per_token
from sparkdraft.operate.bench.random_model import SHAPES, TARGET_FILES, RandomCheckpoint, drafter_shape, shape
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.memory import GRAPHS, RING, request_bytes
from sparkdraft.plan.resolve import may_decode, model_bytes, resolve
from sparkdraft.weights.plane_layout import PassTimes, StoredBytes

LAPTOP = Hardware("cpu", "a laptop", 8, 12 << 30)
SPARK = Hardware("cuda", "GB10", 20, 110 << 30, (12, 1))
SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
SMALL, LARGE = SHAPES["smollm2-135m"], SHAPES["qwen3-8b"]


def test_a_cpu_gets_quantised_weights_and_a_quarter_of_the_memory_for_its_cache() -> None:
    plan = resolve(EngineConfig(), SMALL, LAPTOP)
    assert (plan.weights, plan.dtype, plan.kernels, plan.threads) == ("quantised", "float32", "native", 8)
    assert 0.99 * (3 << 30) < plan.memory.kv <= 3 << 30 and plan.max_model_len == 8192
    assert not plan.fallbacks and plan.graphs


def test_a_cpus_cache_holds_full_contexts_for_all_at_most_and_one_at_least() -> None:
    roomy, tight = (resolve(EngineConfig(), SMALL, replace(LAPTOP, free_bytes=size << 30)) for size in (200, 1))
    assert roomy.num_blocks * 16 == 16 * 8192
    assert tight.num_blocks * 16 == tight.max_model_len == 8192 and not tight.fallbacks


def test_without_a_compiler_auto_falls_back_and_says_why() -> None:
    plan = resolve(EngineConfig(), SMALL, LAPTOP, native_problem="no C++ compiler")
    assert (plan.weights, plan.dtype, plan.kernels) == ("float32", "float32", "reference")
    assert plan.fallbacks[0].reason == "no C++ compiler" and "no C++ compiler" in plan.describe()
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        resolve(EngineConfig(dtype="quantised"), SMALL, LAPTOP, native_problem="no C++ compiler")


def test_a_gpu_gets_bfloat16_and_the_memory_that_is_left() -> None:
    plan = resolve(EngineConfig(), LARGE, SPARK)
    assert (plan.weights, plan.dtype, plan.kernels, plan.graphs) == ("bfloat16", "bfloat16", "cuda", True)
    used = plan.memory.weights + plan.memory.kv + plan.memory.scratch
    assert used <= 0.85 * SPARK.free_bytes
    assert 15e9 < plan.memory.weights < 17e9
    assert plan.memory.kv == plan.num_blocks * 16 * kv_bytes_per_token(LARGE.attention, 2)


def test_quantised_weights_are_counted_as_a_gpu_keeps_them() -> None:
    """gpt-oss-120b fits one H200 as it is published, and not as floats."""
    h200, model = Hardware("cuda", "H200", 16, 139 << 30, (9, 0)), shape("gpt-oss-120b")
    stored = RandomCheckpoint(TARGET_FILES["gpt-oss-120b"], "cpu").stored_bytes()
    assert 57 < stored.quantised / 2**30 < 58, "the experts: 4.25 bits per weight, and filling to whole tiles"
    plan = resolve(EngineConfig(), model, h200, stored=stored)
    assert 60 < plan.memory.weights / 2**30 < 63
    with pytest.raises(UserError, match="does not fit"):
        resolve(EngineConfig(), model, h200)
    floats = StoredBytes(0, 10**13)  # a file that holds more than the model: only the model's own counts
    assert resolve(EngineConfig(), LARGE, SPARK, stored=floats).memory == resolve(EngineConfig(), LARGE, SPARK).memory
    on_a_cpu = resolve(EngineConfig(), SMALL, LAPTOP, stored=StoredBytes(1, 1))
    assert on_a_cpu.memory == resolve(EngineConfig(), SMALL, LAPTOP).memory, "a CPU's kernels keep them in another form"


@pytest.mark.parametrize("form, most", [("int4", 0.39), ("nvfp4", 0.41), ("fp8", 0.6)])
def test_random_weights_of_a_format_are_counted_like_a_files(form: str, most: float) -> None:
    stored = RandomCheckpoint(LARGE, "cpu", form).stored_bytes()
    share = resolve(EngineConfig(), LARGE, SPARK, stored=stored).memory.weights
    assert 0.25 < share / resolve(EngineConfig(), LARGE, SPARK).memory.weights < most


def test_fp8_holds_twice_the_tokens_and_leaves_the_drafter_exact() -> None:
    draft = drafter_shape("dflash-5x", LARGE)
    plans = [
        resolve(EngineConfig(kv=kv), LARGE, SPARK, drafter=d) for kv in ("exact", "fp8") for d in (None, draft.caps())
    ]
    exact, exact_drafts, fp8, fp8_drafts = (plan.num_blocks for plan in plans)
    assert fp8 == pytest.approx(2 * exact, rel=1e-3)
    target, own = (kv_bytes_per_token(m.attention, 1) for m in (LARGE, draft.model))
    assert fp8_drafts / exact_drafts == pytest.approx(2 * (target + own) / (target + 2 * own), rel=1e-3)


def test_rows_per_step_follow_the_requests_at_once() -> None:
    plan = resolve(
        EngineConfig(max_seqs=1000, kv_tokens=64_000, max_model_len=64), LARGE, replace(LAPTOP, free_bytes=64 << 30)
    )
    assert (plan.max_seqs, plan.max_step_tokens) == (1000, 1000)


@pytest.mark.parametrize(
    ("config", "hardware", "words"),
    [
        (EngineConfig(dtype="bfloat16"), LAPTOP, "needs a GPU"),
        (EngineConfig(dtype="quantised"), SPARK, "runs on a CPU only"),
        (EngineConfig(max_model_len=10**6), SPARK, "made for 40960"),
        (EngineConfig(max_step_tokens=4, max_seqs=8), SPARK, "max_step_tokens is 4"),
        (EngineConfig(), replace(SPARK, free_bytes=8 << 30), "does not fit"),
        (EngineConfig(kv_tokens=10**8), SPARK, "ask for .* or fewer"),
        (EngineConfig(kv_tokens=10**8), LAPTOP, "ask for .* or fewer"),
        (EngineConfig(kv_tokens=100, max_model_len=200), SPARK, "KV cache holds 112"),
        (EngineConfig(kv_tokens=10), LAPTOP, "kv_tokens is 10, and a request needs room for 64 tokens"),
        (EngineConfig(max_model_len=10), SPARK, "max_model_len is 10, and a request needs room for 64 tokens"),
        (EngineConfig(kv="fp8"), LAPTOP, "kv fp8 does not run on the CPU kernels"),
        (EngineConfig(kv="fp8"), replace(SPARK, capability=(8, 6)), "capability 8.9; GB10 has 8.6"),
    ],
)
def test_what_can_not_run_is_refused_with_its_sums(config: EngineConfig, hardware: Hardware, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(config, LARGE, hardware)


def test_a_small_cache_shortens_the_context_that_nobody_asked_for() -> None:
    plan = resolve(EngineConfig(kv_tokens=1000), SMALL, LAPTOP)
    assert plan.max_model_len == plan.num_blocks * 16 == 1008
    assert not plan.fallbacks, "a cache of that size is what was asked for"


def test_a_context_that_memory_shortens_is_a_named_fallback() -> None:
    card = Hardware("cuda", "a card", 8, 23 << 30, (8, 9))
    long = replace(LARGE, max_position=131072)
    plan = resolve(EngineConfig(), long, card)
    assert plan.max_model_len < 131072
    assert [f.name for f in plan.fallbacks] == [
        f"a context of {plan.max_model_len:,} tokens instead of the model's 131,072"
    ]
    assert plan.fallbacks[0].name in plan.describe()
    assert not resolve(EngineConfig(max_model_len=4096), long, card).fallbacks, "what was asked for is no fallback"


FASTER, SLOWER = PassTimes((5e-4, 6e-4, 9e-4), (3e-4, 3e-4, 5e-4)), PassTimes((5e-4, 6e-4, 4e-4), (3e-4, 3e-4, 5e-4))


def test_a_gpu_decodes_quantised_weights_where_that_was_measured_faster() -> None:
    stored = StoredBytes(90_000_000, 30_000)
    coded, none, slower, faster = (
        resolve(EngineConfig(), SMALL, SPARK, stored=stored._replace(times=times))
        for times in (None, PassTimes(FASTER.codes, FASTER.codes), SLOWER, FASTER)
    )
    assert not coded.decoded and coded == none == slower, "at every number of tokens, and by more than noise"
    assert faster.decoded and faster.memory.weights == resolve(EngineConfig(), SMALL, SPARK).memory.weights
    assert faster.memory.weights > 2 * coded.memory.weights
    (choice,) = faster.fallbacks
    assert choice.is_choice and choice.name == "quantised weights are decoded and rounded to bfloat16"
    assert choice.reason == (
        "on this GPU the products of 1, 16 and 64 tokens take 0.30, 0.30 and 0.50 ms, and 0.50, 0.60 and 0.90 ms with "
        "the file's codes; bfloat16 takes 0.3 GiB of 110 free"
    )


@pytest.mark.parametrize(
    ("config", "hardware"),
    [
        (EngineConfig(), replace(SPARK, free_bytes=2 << 30)),
        (EngineConfig(weights="int4"), SPARK),
        (EngineConfig(drafter_weights="fp8"), SPARK),
        (EngineConfig(dtype="float32"), SPARK),
        (EngineConfig(), LAPTOP),
    ],
)
def test_weights_stay_coded_where_memory_is_short_or_a_format_is_named(
    config: EngineConfig, hardware: Hardware
) -> None:
    stored = StoredBytes(90_000_000, 30_000, FASTER)
    plan = resolve(config, SMALL, hardware, stored=stored)
    assert not plan.decoded and not any("decoded" in each.name for each in plan.fallbacks)
    assert plan.memory.weights == resolve(config, SMALL, hardware, stored=stored._replace(times=None)).memory.weights
    assert not may_decode(config, SMALL, hardware, None, stored)


def test_a_drafter_is_decoded_with_its_target_and_counted() -> None:
    caps = replace(drafter_shape("dflash-5x", SMALL).caps(), stored=StoredBytes(1_000_000, 0))
    stored = StoredBytes(90_000_000, 30_000)
    coded, decoded = (
        resolve(EngineConfig(), SMALL, SPARK, drafter=caps, stored=stored._replace(times=times))
        for times in (None, FASTER)
    )
    floats = replace(caps, stored=None)
    assert decoded.memory.weights == resolve(EngineConfig(), SMALL, SPARK, drafter=floats).memory.weights
    own = [model_bytes(EngineConfig(), SMALL, SPARK, None, caps, stored._replace(times=t)) for t in (None, FASTER)]
    assert own[0] == coded.memory.weights - 1_000_000 and own[1] == decoded.memory.weights - 2 * caps.num_weights


def test_the_tables_of_penalties_are_counted_in_the_plan() -> None:
    """They are made for the first request that asks, when the caches have taken the rest of the memory."""
    seqs, ids = 8, 50_000
    tables = EditTables(seqs, ids, frozenset(), torch.device("cpu")).tables
    others = [tables.penalties, tables.biased, tables.bias, tables.until]
    logits = 2 * seqs * ids * 4  # of the run before a step is captured, and of the captured step
    counted = [seqs * request_bytes(replace(SMALL, vocab_size=n), 64, 16, 2, "cuda") for n in (0, ids)]
    assert counted[1] - counted[0] > logits + tables.counts.nbytes + sum(each.nbytes for each in others)


def test_what_a_gpu_keeps_of_requests_is_counted_in_the_plan() -> None:
    seqs, context, hidden = 4, 3_000, 512
    config = replace(SMALL, hidden_size=hidden, vocab_size=0)
    caps = replace(drafter_shape("dflash-5x", SMALL).caps(), aux_layers=(1, 2, 3))
    plan: Any = SimpleNamespace(max_seqs=seqs, max_model_len=context, block_size=16, max_step_tokens=64)
    runner: Any = SimpleNamespace(plan=plan, aux_hidden=torch.zeros(8, 3, hidden, dtype=torch.bfloat16))
    proposer: Any = SimpleNamespace(drafter=object(), chain=False, max_depth=7)
    edits: Any = None
    slots = Slots(runner, proposer, RING, torch.device("cpu"), edits, reads_text=True)
    assert slots.text is not None
    made = slots.text.nbytes + slots.tables.nbytes + slots.ring.nbytes
    assert seqs * request_bytes(config, context, 16, 2, "cuda", caps) == made


def test_recordings_are_counted_in_the_plan() -> None:
    plan, none = (resolve(EngineConfig(graphs=graphs), SMALL, LAPTOP) for graphs in (True, False))
    least = GRAPHS["native"].most * GRAPHS["native"].bytes_each * SMALL.num_layers
    assert plan.memory.graphs > least, "and what they write"
    assert "recorded steps" in plan.describe() and "recorded steps" not in none.describe()
    drafted = resolve(EngineConfig(), LARGE, SPARK, drafter=drafter_shape("dflash-5x", LARGE).caps()).memory
    assert drafted.graphs > resolve(EngineConfig(), LARGE, SPARK).memory.graphs > 0
    assert drafted.total <= 0.85 * SPARK.free_bytes


def test_a_plan_never_changes() -> None:
    plan = resolve(EngineConfig(), SMALL, LAPTOP, native_problem="no C++ compiler")
    with pytest.raises(FrozenInstanceError):
        plan.num_blocks = 1  # type: ignore[misc]
    assert isinstance(hash(plan), int), "all that it holds is immutable too"


WITHOUT_TORCH = """
import json, sys
from sparkdraft.config import EngineConfig
from sparkdraft.models.registry import read_config
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from sparkdraft.drafters.dflash import DFlashConfig

model, drafter = (json.load(open(path)) for path in sys.argv[1:])
model, spark = read_config(model), Hardware("cuda", "GB10", 20, 110 << 30, (12, 1))
caps = DFlashConfig.read(drafter).caps()
plan = resolve(EngineConfig(kv="turboquant"), model, spark, drafter=caps)
print(plan.kernels, plan.num_blocks > 0, plan.coded is not None, sorted({"torch", "triton"} & set(sys.modules)))
"""


def test_a_plan_is_made_from_a_config_file_without_torch(tmp_path: Path) -> None:
    drafter = Path(sparkdraft.__file__).parent / "assets/smollm2-dflash/config.json"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMOLLM2))
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, config, drafter], capture_output=True, text=True, check=True
    )
    assert made.stdout.split(maxsplit=3) == ["cuda", "True", "True", "[]\n"]
