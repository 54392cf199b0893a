"""The embedded model end to end: its text is transformers' text, and its quantised weights are the same model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparkdraft.operate.bench
from sparkdraft.core import SamplingParams
from sparkdraft.llm import LLM, Completion
from sparkdraft.operate.bench.prompts import HELDOUT

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,",
    "import numpy as np\n\n",
    "In 1969, the first",
    '{"name": "Ada", "age":',
    "Q: What is 12 times 12?\nA:",
    "To make bread you need",
    "SELECT name, age FROM",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "<html>\n<head>",
    "She opened the letter and read:",
    "A good friend is someone who",
    "The meaning of life is",
]
TIE = 1e-3
CUDA = torch.cuda.is_available()
CLASSES = ("code", "maths", "json", "qa", "dialogue", "prose")


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Iterator[Any]:
    import transformers

    yield transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize(
    ("device", "count"),
    [
        pytest.param("cpu", 20, marks=pytest.mark.slow),  # the oracle alone takes half a minute to load
        pytest.param("cuda", 20, marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA GPU")]),
    ],
)
def test_greedy_text_equals_transformers(device: str, count: int, oracle: Any) -> None:
    """Each of our tokens is the oracle's most likely one after the same text, so by induction the texts are equal."""
    llm = LLM("smollm2", dtype="float32", device=device)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    ties = []
    for prompt, result in zip(PROMPTS[:count], llm.generate(PROMPTS[:count], params), strict=True):
        before, written = llm.encode(prompt), result.completions[0].ids
        assert len(written) == 64
        with torch.inference_mode():
            logits = oracle(torch.tensor([before + written])).logits[0, len(before) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1)
        ties += [f"{prompt!r} at {i}" for i in (behind > 0).nonzero().flatten().tolist()]
        assert float(behind.max()) < TIE, prompt
    print(f"ties within {TIE}: {ties or 'none'}")


@pytest.mark.slow
def test_quantised_weights_keep_the_perplexity() -> None:
    def entropy(dtype: str) -> float:
        """Nats per token of unseen text."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        found = LLM("smollm2", dtype=dtype).generate([HELDOUT.read_text()[:1500]], params)[0].completions[0]
        scores = [token.logprob for token in found.prompt_logprobs or [] if token is not None]
        assert len(scores) > 250
        return -sum(scores) / len(scores)

    assert entropy("quantised") == pytest.approx(entropy("float32"), abs=0.01)


def test_quantised_text_is_the_same_in_any_company() -> None:
    llm = LLM("smollm2", dtype="quantised")
    params = SamplingParams(max_tokens=24)
    together = [r.completions[0].ids for r in llm.generate(PROMPTS[:8], params)]
    for prompt, ids in zip(PROMPTS[:8], together, strict=True):
        assert llm.generate([prompt], params)[0].completions[0].ids == ids


# ---- drafting


def chats(llm: LLM, each: int) -> list[list[int]]:
    """The first prompts of each class, as conversations."""
    lines = (Path(sparkdraft.operate.bench.__file__).parent / "prompts.jsonl").read_text().splitlines()
    prompts = [(p["class"], p["prompt"]) for p in map(json.loads, lines)]
    chosen = [text for kind in CLASSES for text in [t for k, t in prompts if k == kind][:each]]
    assert len(chosen) == each * len(CLASSES)
    return [llm.chat_ids([{"role": "user", "content": text}]) for text in chosen]


@pytest.mark.parametrize(
    ("device", "kv", "each", "max_tokens", "depths"),
    [
        pytest.param("cpu", "exact", 1, 48, (None, 3, 15), id="some", marks=pytest.mark.slow),
        pytest.param("cpu", "exact", 10, 128, (None, 1, 3, 7, 15), id="sixty-prompts", marks=pytest.mark.slow),
        pytest.param("cuda", "exact", 4, 128, (None, 1, 3, 7, 15), id="cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "turboquant", 4, 256, (None, 1, 3, 7, 15), id="cuda-coded", marks=pytest.mark.gpu),
    ],
)
def test_drafted_text_is_the_plain_text(
    device: str, kv: str, each: int, max_tokens: int, depths: tuple[int | None, ...]
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    llm = LLM("smollm2", device=device, kv=kv)
    prompts = chats(llm, each)
    # On a GPU a row's last bit does not depend on the drafts beside it, but on the rows of a step past 16.
    batches = [prompts] if device == "cpu" else [[prompt] for prompt in prompts]

    def written(depth: int | None) -> list[Completion]:
        params = SamplingParams(max_tokens=max_tokens, num_draft=depth)
        return [r.completions[0] for batch in batches for r in llm.generate(batch, params)]

    written(0)  # a prompt whose beginning is found in the prefix cache is computed in fewer rows than it was at first
    plain = written(0)
    for depth in depths:
        drafted = written(depth)
        differ = [i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a.ids != b.ids]
        assert not differ, f"depth {depth} differs for prompts {differ}"
        counts = [c.speculation["sources"].get("dflash", (0, 0)) for c in drafted if c.speculation]
        assert depth is None or 0 < sum(c[1] for c in counts) < sum(c[0] for c in counts)


def test_the_embedded_drafter_needs_no_flag() -> None:
    params = SamplingParams(max_tokens=32, num_draft=3)
    messages = [{"role": "user", "content": "Write a Python function that sorts a list."}]
    drafted = LLM("smollm2").chat(messages, params)
    plain = LLM("smollm2", spec="off").chat(messages, SamplingParams(max_tokens=32))
    assert drafted.speculation and drafted.speculation["sources"]["dflash"][1] > 0
    assert plain.speculation is None and plain.ids == drafted.ids


def test_nothing_is_recorded_while_a_request_waits(untimed: None) -> None:
    """A block may be cut to any number of drafts: the steps of one request are all recorded at start."""
    model = LLM("smollm2")
    graphs = model.engine.runner.graphs
    if graphs is None:
        pytest.skip("steps are not recorded here")
    before = graphs.num_held
    for prompt in ("Why is the sky blue?", "Count to thirty.", "Write a haiku."):
        done = model.chat([{"role": "user", "content": prompt}], SamplingParams(max_tokens=48))
        assert done.speculation and done.speculation["num_draft_tokens"]
    assert graphs.num_held == before


@pytest.mark.slow
def test_a_repeated_prompt_restores_the_drafters_cache_too() -> None:
    """With the prefix cache the second run computes only the prompt's end, and drafts as well as the first."""
    params = SamplingParams(max_tokens=64, num_draft=7, ignore_eos=True)
    cached, cold = LLM("smollm2", ngram=False), LLM("smollm2", ngram=False, prefix_cache=False)
    prompt = cached.tokenizer.encode(HELDOUT.read_text(), add_special=False)[:325]
    first, second, plain = (llm.generate([prompt], params)[0].completions[0] for llm in (cached, cached, cold))
    assert (first.num_cached, second.num_cached, plain.num_cached) == (0, 320, 0)
    assert first.ids == second.ids == plain.ids
    counts = [c.speculation["acceptance_histogram"] for c in (first, second, plain) if c.speculation]
    assert len(counts) == 3 and counts[0] == counts[1] == counts[2]
    assert sum(i * n for i, n in enumerate(counts[0])) > 0


@pytest.mark.slow
def test_the_engine_accepts_what_a_replay_of_its_text_accepts() -> None:
    """Two ways to the same figure: the engine's own steps, and one pass over the text with the walk replayed."""
    script = Path(__file__).parent.parent / "tools" / "replay_acceptance.py"
    spec = importlib.util.spec_from_file_location("replay_acceptance", script)
    assert spec and spec.loader
    replay = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(replay)
    llm = LLM("smollm2", ngram=False)
    for prompt in chats(llm, 1)[:2]:
        pieces = list(llm.stream(prompt, SamplingParams(max_tokens=80, num_draft=15)))
        ids = prompt + [token for piece in pieces for token in piece.ids]
        with torch.inference_mode():
            steps = replay.walk(replay.drafter_of(llm), replay.observe_text(llm, ids), ids, len(prompt))
        accepted = [len(piece.ids) - 1 for piece in pieces[1:]]  # the first id comes from the prompt
        together = min(len(accepted), len(steps)) - 2  # the last block is cut by the limit
        assert accepted[:together] == [count for _, count in steps[:together]]
        assert sum(accepted[:together]) > 10
