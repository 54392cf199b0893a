"""What a step of a GPU costs the host, counted and not timed: torch's operators, and all functions, that are called
outside of what is captured. On a GPU every operator is a launch, and 64 streams leave a small model 1 ms per step."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sparkdraft import LLM, SamplingParams
from sparkdraft.core import Batch
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.fakes.steps import device_steps, on_device
from tests.models.tiny import write_tiny

SAMPLED = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "presence_penalty": 1.5}


class HostWork(TorchDispatchMode):
    """Counts operators and calls while no captured step is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.calls = 0
        self.replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not self.replaying
        return func(*args, **(kwargs or {}))

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call") and not self.replaying

    def around(self, replay: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def replayed(kind: Any) -> Any:
            self.replaying = True
            try:
                return replay(kind)
            finally:
                self.replaying = False

        return replayed


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny(folder / "target", "qwen3")
    drafter = write_drafter(folder / "drafter", zlab(body()), random_tensors(body()))
    room = {"max_seqs": 16, "kv_tokens": 16 * 256}
    return on_device(LLM(str(target), drafter=str(drafter), device="cpu", ngram=False, prefix_cache=False, **room))


@pytest.fixture
def work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostWork]:
    found = HostWork()
    for graphs in device_steps(llm).graphs:
        monkeypatch.setattr(graphs, "replay", found.around(graphs.replay))
    yield found
    while llm.engine.has_work:
        llm.engine.step()


def per_step(llm: LLM, work: HostWork, streams: int, depth: int) -> dict[str, tuple[float, float]]:
    """Operators and calls by kind of step, of requests that come and go: when one ends the next begins. The medians; of
    steps without prompts the most operators of one. (The first prompts, many at once, are not captured.)"""
    engine, found = llm.engine, defaultdict[str, list[tuple[int, int]]](list)
    steps, kind = device_steps(llm), ""
    launch = steps.launch

    def launched(batch: Batch) -> None:
        nonlocal kind
        kind = "prompts" if batch.num_prompt_rows else "slots"
        launch(batch)

    steps.launch = launched  # type: ignore[method-assign]
    number = 0

    def add() -> None:
        nonlocal number
        params = SamplingParams(16 + 3 * (number % 5), seed=number, num_draft=depth, ignore_eos=True, **SAMPLED)
        engine.add([100 + number % 7, *range(20, 40)], params)
        number += 1

    for _ in range(streams):
        add()
    try:
        for _ in range(40):
            kind, work.operators, work.calls = "", 0, 0
            with work:
                sys.setprofile(work.profile)
                outputs = engine.step()
                sys.setprofile(None)
            if kind:
                found[kind].append((work.operators, work.calls))
            for output in outputs:
                if output.finish:
                    add()
    finally:
        del steps.launch  # type: ignore[method-assign]
    for name in list(engine._by_id):
        engine.abort(name)
    operators = {"slots": max(o for o, _ in found["slots"]), "prompts": median(o for o, _ in found["prompts"])}
    return {kind: (operators[kind], median(c for _, c in found[kind])) for kind in operators}


@pytest.mark.parametrize(
    ("depth", "most"),
    [(0, {"slots": (20, 100), "prompts": (110, 240)}), (3, {"slots": (26, 160), "prompts": (100, 265)})],
)
def test_operators_do_not_grow_with_the_streams(
    llm: LLM, work: HostWork, depth: int, most: dict[str, tuple[int, int]]
) -> None:
    """most: operators of a step, and calls per stream."""
    few, many = (per_step(llm, work, streams, depth) for streams in (8, 16))
    for kind, (most_operators, most_calls) in most.items():
        (operators, _), (now, calls) = few[kind], many[kind]
        assert now <= 1.25 * operators + 4 and now <= most_operators, (kind, few, many)
        assert calls <= 16 * most_calls, (kind, many)
