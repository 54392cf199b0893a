"""The whole loop on tiny pairs: z-lab's own text, step by step, and the plain text whatever drafts, batches or caches.

A random drafter is never right, so each is taught here, for a second or two, the greedy text of its random target.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparkdraft.core import SamplingParams
from sparkdraft.kernels import native
from sparkdraft.llm import LLM, Completion
from tests.drafters.tiny_drafter import MASK, body, random_tensors, speculators, write_drafter, zlab
from tests.models.tiny import oracle, write_tiny

needs_compiler = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
LENGTH, OUTPUT, TAUGHT = 100, 48, 100
BODIES = {"full": body("ff"), "sliding": body("ssf", window=6)}
# Aux layers are 0 and 2 of 4. Transformers gives z-lab the normed state of a last layer, and no drafter reads that.
TARGET = {"num_hidden_layers": 4, "initializer_range": 0.1}
PAIRS = [
    pytest.param(("llama", "full"), id="llama-full"),
    pytest.param(("qwen3-tied", "sliding"), id="qwen3-tied-sliding"),
    pytest.param(("llama", "sliding"), id="llama-sliding", marks=pytest.mark.slow),
    pytest.param(("qwen3-tied", "full"), id="qwen3-tied-full", marks=pytest.mark.slow),
]
PROMPTS = torch.randint(3, 259, (3, LENGTH), generator=torch.Generator().manual_seed(8)).tolist()


def made_for_four(dimensions: dict[str, Any], block: int = 8) -> dict[str, Any]:
    return zlab(dimensions, block, num_target_layers=TARGET["num_hidden_layers"])


@dataclass(frozen=True)
class Pair:
    target: Path
    dimensions: dict[str, Any]
    tensors: dict[str, Tensor]
    root: Path
    loops: dict[int, list[Any]] = field(default_factory=dict)  # by size of a block

    def drafter(self, block: int = 8, dialect: str = "zlab") -> Path:
        folder = self.root / f"{dialect}-{block}"
        if not folder.exists():
            make = {"zlab": made_for_four, "speculators": speculators}[dialect]
            write_drafter(folder, make(self.dimensions, block), self.tensors)
        return folder

    def llm(self, block: int = 8, dialect: str = "zlab", **options: Any) -> LLM:
        drafter = str(self.drafter(block, dialect))
        return LLM(
            str(self.target), **{"dtype": "float32", "ngram": False, "threads": 1, "drafter": drafter, **options}
        )

    def looped(self, dflash: Any, block: int) -> list[Any]:
        """What z-lab's loop makes of each prompt, once for both dialects of ours."""
        if block not in self.loops:
            model = dflash.DFlashDraftModel.from_pretrained(self.drafter(block), dtype=torch.float32).eval()
            target, prompts = oracle(self.target), [torch.tensor([prompt]) for prompt in PROMPTS]
            self.loops[block] = [
                dflash.dflash_generate(model, target, each, OUTPUT, None, return_stats=True) for each in prompts
            ]
        return self.loops[block]


@pytest.fixture(scope="module")
def dflash() -> Iterator[Any]:
    reason = "z-lab's package is not installed: pip install --no-deps dflash==0.1.0"
    package = pytest.importorskip("dflash.model", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "_cuda_time", time.perf_counter)  # its clock waits for a GPU
        yield package


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dflash: Any) -> Pair:
    target, kind = request.param
    root = tmp_path_factory.mktemp(f"{target}-{kind}")
    write_tiny(root / "target", target, **TARGET)
    write_drafter(root / "random", made_for_four(BODIES[kind]), random_tensors(BODIES[kind]))
    return Pair(root / "target", BODIES[kind], taught(dflash, root / "target", root / "random"), root)


def taught(dflash: Any, target_folder: Path, folder: Path) -> dict[str, Tensor]:
    """The drafter's tensors after a few steps on what the target writes: often right, and often wrong."""
    torch.set_num_threads(1)  # all is too small to share
    target = oracle(target_folder)
    with torch.no_grad():
        texts = target.generate(torch.tensor(PROMPTS), min_new_tokens=OUTPUT, max_new_tokens=OUTPUT, do_sample=False)
        model = dflash.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
        hidden = target(texts, output_hidden_states=True).hidden_states
        aux_hidden, size = dflash.extract_context_feature(hidden, model.target_layer_ids), model.block_size
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(TAUGHT):
        start = int(torch.randint(LENGTH, LENGTH + OUTPUT - size, (), generator=generator))
        block = torch.full((len(texts), size), MASK)
        block[:, 0] = texts[:, start]
        hidden = model(
            position_ids=torch.arange(start + size)[None],
            noise_embedding=target.get_input_embeddings()(block).detach(),
            target_hidden=aux_hidden[:, :start],
        )
        logits = model.compute_logits(hidden[:, 1:], target.lm_head)
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), texts[:, start + 1 : start + size].flatten()).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def greedy(num_draft: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, num_draft=num_draft, ignore_eos=True, **options)


def write(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[Completion]:
    each = list(params) * len(prompts) if len(params) == 1 else list(params)
    return [r.completions[0] for r in llm.generate(prompts, each)]


def texts(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[list[int]]:
    return [c.ids for c in write(llm, prompts, *params)]


def whole_steps(lengths: list[int], block: int) -> list[int]:
    """Steps that began with a whole block to go; after them z-lab's and ours are cut short in different ways."""
    return [n for i, n in enumerate(lengths) if sum(lengths[:i]) + block <= OUTPUT]


# ---- against the oracle


@pytest.mark.parametrize("dialect", ["zlab", "speculators"])
@pytest.mark.parametrize("block", [4, 8])
def test_text_and_every_step_are_those_of_zlabs_loop(pair: Pair, dflash: Any, block: int, dialect: str) -> None:
    llm, lengths = pair.llm(block, dialect), []
    for prompt, theirs in zip(PROMPTS, pair.looped(dflash, block), strict=True):
        pieces = list(llm.stream(prompt, greedy(block - 1)))
        assert [i for p in pieces for i in p.ids] == theirs.output_ids[0, LENGTH:].tolist()
        steps = whole_steps([1, *theirs.acceptance_lengths], block)
        assert whole_steps([len(p.ids) for p in pieces], block) == steps
        lengths += steps[1:]
    assert 1 in lengths and block in lengths and len(set(lengths)) > 2, "drafts must be right, wrong, and both"


# ---- against the plain text


@pytest.mark.parametrize("dtype", ["float32", pytest.param("quantised", marks=needs_compiler)])
def test_text_is_the_plain_text_at_every_depth(pair: Pair, dtype: str) -> None:
    llm = pair.llm(dtype=dtype)
    plain = texts(pair.llm(dtype=dtype, spec="off"), PROMPTS, replace(greedy(None), max_tokens=32))
    for depth in (None, *range(8)):
        written = write(llm, PROMPTS, replace(greedy(depth), max_tokens=32))
        assert [c.ids for c in written] == plain, depth
        if depth:
            counts = [c.speculation for c in written if c.speculation]
            drafted, accepted = (sum(c[f"num_{k}_tokens"] for c in counts) for k in ("draft", "accepted_draft"))
            assert 0 < accepted < drafted, "drafts must be right and wrong"


def test_requests_of_several_depths_share_a_batch(pair: Pair) -> None:
    llm = pair.llm(prefix_cache=False)
    params = [greedy(depth) for depth in (0, 7, None)]
    alone = [texts(llm, [prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert texts(llm, PROMPTS, *params) == alone


def test_a_cached_prompt_is_drafted_from_as_if_it_had_been_read(pair: Pair) -> None:
    cold, llm = pair.llm(prefix_cache=False), pair.llm()
    (first,) = write(llm, PROMPTS[:1], greedy(7))
    longer = PROMPTS[0] + first.ids[:40]  # its last cached blocks were written while decoding
    for prompt, num_cached in ((PROMPTS[0], 96), (longer, 128)):
        ((again,), (plain,)) = write(llm, [prompt], greedy(7)), write(cold, [prompt], greedy(7))
        assert (again.num_cached, plain.num_cached) == (num_cached, 0)
        assert again.ids == plain.ids
        assert again.speculation and plain.speculation and plain.speculation["num_accepted_draft_tokens"] > 0
        for count in ("acceptance_histogram", "per_position_accepted", "sources"):
            assert again.speculation[count] == plain.speculation[count]


def test_preempted_requests_write_the_same(pair: Pair) -> None:
    plain = texts(pair.llm(spec="off"), PROMPTS, greedy(None))
    for prefix_cache in (False, True):
        llm, preempted = pair.llm(kv_tokens=288, prefix_cache=prefix_cache), 0
        schedule = llm.engine.scheduler.schedule

        def counted(depths: Any, schedule: Any = schedule) -> Any:
            nonlocal preempted
            batch = schedule(depths)
            preempted += len(batch.preempted)
            return batch

        llm.engine.scheduler.schedule = counted  # type: ignore[method-assign]
        assert texts(llm, PROMPTS, greedy(7)) == plain
        assert preempted, "the test must exercise preemption"
        assert llm.engine.pool.num_free == llm.plan.num_blocks
