"""A toy architecture with two geometries, a window, a borrowed cache and experts, through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft import LLM, SamplingParams
from sparkdraft.cache.layered import LayeredKV
from sparkdraft.cache.pages import RecentRows, pages_of_a_request
from sparkdraft.cli.main import main
from sparkdraft.core import Batch
from sparkdraft.models import registry
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.operate.bench.offline import Bench, Ceilings, Load
from sparkdraft.plan.resolve import MOST_AHEAD
from sparkdraft.speculation.costs import GRID
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import on_device
from tests.models import toy

WINDOW, BLOCK = toy.CONFIG["sliding_window"], 16
PROMPTS = [[(7 * i * (k + 1) + k) % 300 + 3 for i in range(20 + 37 * k)] for k in range(5)]
PARAMS = [SamplingParams(40 + 9 * k, temperature=0.9 * (k % 2), seed=k, ignore_eos=True) for k in range(5)]


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    registry.register(toy)
    yield
    del registry._known["toy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = body("ff", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)
    config = zlab(shape, num_target_layers=4, inner={"target_layer_ids": [0, 2]})
    return write_drafter(tmp_path_factory.mktemp("drafter"), config, random_tensors(shape))


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **({"device": "cpu", "spec": "off", "kv_tokens": 2048, "block_size": BLOCK} | options))


def written(llm: LLM, prompts: list[list[int]] = PROMPTS, params: list[SamplingParams] = PARAMS) -> list[list[int]]:
    return [c.ids for r in llm.generate(prompts, params) for c in r.completions]


def alone(llm: LLM) -> list[list[int]]:
    return [written(llm, [p], [s])[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def group(llm: LLM) -> RecentRows:
    (found,) = llm.engine.scheduler.groups.parts
    assert isinstance(found, RecentRows)
    return found


def all_is_free(llm: LLM) -> bool:
    pages = group(llm).pages.num_free == llm.engine.plan.windows[0].pages
    return pages and llm.engine.pool.num_free == llm.engine.plan.num_blocks


def test_it_computes_what_the_oracle_computes(folder: Path) -> None:
    """A prompt longer than the window, in chunks, and what is written after it."""
    llm = load(folder, dtype="float32", max_step_tokens=40)
    prompt = PROMPTS[4]
    llm.engine.add(prompt, SamplingParams(30, prompt_logprobs=0, ignore_eos=True))
    ids, reported = list(prompt), []
    while llm.engine.has_work:
        for output in llm.engine.step():
            ids += output.ids
            reported += output.prompt_logprobs or []
    scores = toy.toy_logits(folder, ids).log_softmax(-1)
    expected = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    found = torch.tensor([each.logprob for each in reported if each])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "auto"])
def test_company_drafts_and_prefixes_change_no_text(folder: Path, drafter: Path, dtype: str) -> None:
    plain = load(folder, dtype=dtype, prefix_cache=False)
    expected = alone(plain)
    assert written(plain) == expected and all_is_free(plain)
    drafted = load(folder, dtype=dtype, spec="3", drafter=str(drafter))
    assert written(drafted) == expected and written(drafted) == expected  # the second time from the prefix cache
    assert alone(drafted) == expected
    assert drafted.engine.drafting.so_far().num_spec_steps > 50 and all_is_free(drafted)


@pytest.mark.parametrize("drafts", ["off", "3"])
def test_every_decode_step_is_replayed_on_a_cpu(
    folder: Path, drafter: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, GELU, biases, norms after a sublayer, a scaled embedding and capped logits: no operator is torch's."""
    llm = load(folder, spec=drafts, **({} if drafts == "off" else {"drafter": str(drafter)}))
    assert llm.plan.kernels == "native" and llm.engine.runner.unrecorded == [] and llm.engine.runner.graphs
    assert not [each for each in llm.fallbacks() if each.name.startswith("decode")], llm.fallbacks()
    prompts, params = [PROMPTS[1]], [SamplingParams(40, ignore_eos=True)]
    first, eager = written(llm, prompts, params), []
    forward = llm.engine.runner._forward
    monkeypatch.setattr(llm.engine.runner, "_forward", lambda *args: eager.append(args) or forward(*args))
    assert written(llm, prompts, params) == first
    assert len(eager) <= 1, "the prompt's rows, and nothing else"


def test_steps_that_the_device_takes_by_itself_find_the_pages_too(folder: Path, drafter: Path) -> None:
    plain, overlapped = load(folder), load(folder, spec="3", drafter=str(drafter), ngram=False)
    on_device(overlapped)
    assert written(overlapped) == written(plain) and all_is_free(overlapped)


def test_a_request_holds_pages_for_its_window_alone(folder: Path) -> None:
    llm = load(folder, prefix_cache=False)
    llm.engine.add(PROMPTS[4], SamplingParams(250, ignore_eos=True))
    while not llm.engine.scheduler.decoding():
        llm.engine.step()
    (request,) = llm.engine.scheduler.running
    most, free = 0, llm.engine.plan.windows[0].pages
    while llm.engine.has_work:
        most = max(most, free - group(llm).pages.num_free)
        blocks = len(request.blocks)
        llm.engine.step()
    assert blocks == (len(PROMPTS[4]) + 250) // BLOCK > 2 * most
    assert most <= pages_of_a_request(BLOCK, 0, WINDOW, MOST_AHEAD)


def test_a_prefix_is_used_as_far_as_its_window_is_still_there(folder: Path) -> None:
    """Others take the pages of a text that is not read any more; its blocks stay, and are of no use without them."""
    llm = load(folder)
    long = PROMPTS[4] + PROMPTS[3]
    follow_up = [[*long, 5, 6, 7]], [SamplingParams(8, ignore_eos=True)]
    first = llm.generate(*follow_up)[0].completions[0]
    again = llm.generate(*follow_up)[0].completions[0]
    assert again.ids == first.ids
    assert (first.num_cached, again.num_cached) == (0, len(long) // BLOCK * BLOCK)
    pages = group(llm).pages
    taken = [pages._pool.allocate() for _ in range(pages.num_free)]  # as others would
    pages._pool.release(taken)
    last = llm.generate(*follow_up)[0].completions[0]
    assert last.ids == first.ids and last.num_cached == 0


def test_what_is_masked_is_no_other_requests(folder: Path) -> None:
    """A tile reaches out of the window; pages that are missing there are read as zeros, whatever other pages hold."""
    llm = load(folder, prefix_cache=False)
    expected = alone(llm)
    kv = llm.engine.runner.kv
    assert isinstance(kv, LayeredKV)
    with torch.inference_mode():
        for group in kv.windows.values():
            for tensor in (*group.kv.k, *group.kv.v):
                tensor[: group.missing] = float("nan")
    assert alone(llm) == expected


def test_requests_that_give_their_blocks_back_write_the_same(folder: Path) -> None:
    roomy, tight = load(folder), load(folder, kv_tokens=400, max_model_len=400)
    assert written(tight) == written(roomy)
    assert tight.engine.scheduler.num_preempted and all_is_free(tight)


def test_the_plan_counts_windows_apart(folder: Path) -> None:
    plan = load(folder).engine.plan
    (window,) = plan.windows
    assert window.window == WINDOW and window.page_bytes == 2 * 4 * 16 * BLOCK * 4  # one layer owns its keys
    assert plan.memory.pages == window.nbytes
    assert plan.memory.kv == plan.num_blocks * BLOCK * 2 * (2 * 2 * 32) * 4  # two layers over everything
    assert f"of window {WINDOW}" in plan.describe()


def test_a_floor_counts_the_experts_and_the_window_that_rows_reach(folder: Path) -> None:
    llm = load(folder, dtype="float32")
    model, sizes = llm.engine.runner.model, model_sizes(llm.model_config)
    for rows in (1, 3, 40):
        assert model.nbytes(rows) == pytest.approx(4 * sizes.read(rows))
    expert = 4 * 3 * 64 * 32
    assert model.nbytes(1e6) - model.nbytes(1) == pytest.approx(2 * 2 * expert)  # two of four, in two layers
    bench = Bench(llm.engine, llm.model_config, Ceilings(1e9, None))
    plain, drafted = bench.floor_bytes(Load(2, 60, 40)), bench.floor_bytes(Load(2, 60, 40), drafts=3.0)
    assert plain["target"] == model.nbytes(2) and drafted["target"] == model.nbytes(8)
    full, slides = 2 * 2 * 2 * 32, 2 * 4 * 16  # two layers over everything, one that keeps a window
    assert plain["target_kv"] == 4 * 2 * (80 * full + WINDOW * slides)


def test_the_bench_says_how_experts_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--prompt-len", "20", "--output-len", "8", "--concurrency", "2")
    assert main(["bench", "offline", "--model", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert "choose independently" in out and report["floor"] in out and report["rows"][0]["rows"] == 2


def test_drafts_that_are_timed_at_start_reach_different_experts(folder: Path) -> None:
    """Of equal ids a mixture of experts would read one row's, and drafts would seem to cost nothing."""
    engine = load(folder, spec="auto").engine
    assert engine.drafting.budget
    verify = engine.drafting.budget.costs.buckets[0, 0].verify
    assert all(verify.weight[GRID.index(1 + depth)] for depth in engine.drafting.choices)
    tried: list[list[int]] = []
    propose = engine.drafting.propose

    def seen(batch: Batch) -> None:
        propose(batch)
        tried.extend(work.drafts for work in batch.work if work.drafts)

    engine.drafting.propose = seen  # type: ignore[method-assign]
    engine.warm_up()
    assert {len(drafts) for drafts in tried} == set(engine.drafting.choices) - {0}
    assert all(len(set(drafts)) == len(drafts) for drafts in tried)
