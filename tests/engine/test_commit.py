"""Every step ends with a commit: a cache that must know the committed rows is told the same by host and device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.cache.formats import KVFormat, LayerKV
from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import Request
from sparkdraft.kernels.view import AttentionParams, AttentionView, RopeArgs
from tests.engine.test_overlap import TEXTS, with_overlap

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class FirstLayer:
    """Keeps what a step says of its rows, for the commit that ends it."""

    def __init__(self, inner: LayerKV) -> None:
        self.inner = inner
        self.positions, self.view = torch.empty(0), AttentionView(*[torch.empty(0)] * 3, 0, 0)

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        self.positions = rope_args.positions
        self.inner.write(qkv, rope_args, slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        self.view = view
        return self.inner.attend(q, view, params)


class RunningState(KVFormat):
    """A cache with a state that runs through all rows: here the number of rows, by a sequence's first block.

    All of it is on the device, so that it works in recorded steps. A state that a step begins anywhere but where the
    last commit left it is broken.
    """

    def __init__(self, inner: DenseKV) -> None:
        self.first = FirstLayer(inner.layers[0])
        self.layers = [self.first, *inner.layers[1:]]
        self.bytes_per_token, device = inner.bytes_per_token, inner.k[0].device
        self.stands = torch.zeros(inner.k[0].shape[0] + 1, dtype=torch.int32, device=device)  # the last is for padding
        self.is_broken = torch.zeros((), dtype=torch.bool, device=device)
        self.log: list[list[tuple[int, int]]] = []  # of each step on a CPU: (first block, rows that stand)

    def commit(self, counts: Tensor) -> None:
        assert counts.dtype == torch.int32 and counts.device == self.stands.device
        view, is_there = self.first.view, counts > 0
        begin = self.first.positions[view.query_start[: len(counts)].long()]
        block = view.block_tables[: len(counts), 0].where(is_there, len(self.stands) - 1).long()
        self.is_broken |= (is_there & (begin != 0) & (begin != self.stands[block])).any()
        self.stands[block] = begin + counts
        if counts.device.type == "cpu":
            self.log.append([(b, c) for b, c in zip(block.tolist(), counts.tolist(), strict=True) if c])

    def check(self, requests: list[Request]) -> None:
        assert not self.is_broken, "a step began where no commit had ended"
        assert [int(self.stands[r.blocks[0]]) for r in requests] == [r.num_computed for r in requests]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """Two engines: in one the host runs every step, in the other steps overlap where possible."""
    device = str(request.param)
    host, overlapped = (
        LLM(
            "smollm2",
            ngram=False,
            max_seqs=6,
            kv_tokens=4096,
            prefix_cache=False,
            graphs=False,
            device=device,
            dtype="float32" if device == "cuda" else "auto",
        )
        for _ in range(2)
    )
    yield host, with_overlap(overlapped)


def followed(llm: LLM) -> RunningState:
    kv = llm.engine.runner.kv
    assert isinstance(kv, DenseKV)
    state = llm.engine.runner.kv = RunningState(kv)
    return state


def counts_of(llm: LLM, depth: int, length: int) -> dict[str, list[int]]:
    """Per request: the committed rows of each of its steps, for three requests that begin together."""
    engine, kv = llm.engine, llm.engine.runner.kv
    state = followed(llm)
    for i in range(3):
        params = SamplingParams(max_tokens=8 * length, num_draft=depth, ignore_eos=True)
        engine.add(llm.encode(TEXTS[i]), params, str(i))
    requests = [engine._by_id[str(i)][0] for i in range(3)]
    while min(len(r.output_ids) for r in requests) < length:
        engine.step()
    engine.read_launched()
    state.check(requests)
    name_of = {request.blocks[0]: request.id for request in requests}
    counts: dict[str, list[int]] = {request.id: [] for request in requests}
    for step in state.log:
        for block, count in step:
            counts[name_of[block]].append(count)
    for request in requests:
        engine.abort(request.id)
    engine.step()
    engine.runner.kv = kv
    return counts


@pytest.mark.parametrize("depth", [0, 7])
def test_both_paths_commit_the_same_rows(pair: tuple[LLM, LLM], depth: int) -> None:
    host, overlapped = (counts_of(llm, depth, 48) for llm in pair)
    for name, ours in overlapped.items():
        steps = min(len(ours), len(host[name]))
        assert ours[:steps] == host[name][:steps]
    if depth and any(overlapped.values()):  # a GPU keeps no log
        stood = [count for counts in overlapped.values() for count in counts[1:]]
        assert max(stood) > 2 and min(stood) == 1, "some drafts stand, and some do not"


def test_a_state_goes_on_where_the_last_step_left_it_whoever_comes_and_goes(pair: tuple[LLM, LLM]) -> None:
    """Requests join and leave while others run ahead: host and device run steps of the same requests in turn."""
    _, llm = pair
    engine, kv = llm.engine, llm.engine.runner.kv
    state, params = followed(llm), SamplingParams(max_tokens=30, num_draft=3, ignore_eos=True)
    arrivals = {0: 0, 3: 1, 4: 2, 9: 3, 10: 4, 17: 5}  # step -> text
    for step in range(120):
        if step in arrivals:
            engine.add(llm.encode(TEXTS[arrivals[step]]), params, str(arrivals[step]))
        if engine.has_work:
            engine.step()
        if step % 7 == 6:  # else some steps are not read yet
            engine.read_launched()
            state.check(engine.scheduler.running)
    assert not engine.has_work and not state.is_broken
    engine.runner.kv = kv


def test_a_cache_whose_rows_stand_alone_is_not_told(pair: tuple[LLM, LLM]) -> None:
    assert all(llm.engine.runner.kv.commit is None for llm in pair)
