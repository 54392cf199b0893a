"""Each probe of the canary passes on the embedded model, and finds a fault of its kind that is planted there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkdraft.backend import DRAFTING, PREFIX_CACHE
from sparkdraft.cache.formats.dense import DenseLayer
from sparkdraft.cache.prefix import Hit, PrefixCache
from sparkdraft.config import EngineConfig
from sparkdraft.core import GrammarSpec, SamplingParams, TokenLogprob
from sparkdraft.engine import host_steps
from sparkdraft.engine.backend import EngineBackend
from sparkdraft.engine.load import load
from sparkdraft.engine.sampler import Sampled
from sparkdraft.operate.canary import probes
from sparkdraft.operate.canary.findings import FAILED, PASSED, Failed, Finding, Skipped
from sparkdraft.operate.canary.probes import Asker, call_is_read, needle_is_found, read_call
from sparkdraft.operate.canary.run import run_probes, switch_off
from sparkdraft.text.events import Content, Event, ToolArguments
from sparkdraft.text.tools.generic import Generic, GenericParser

Patch = pytest.MonkeyPatch


def slow(*values: Any) -> Any:
    """A further case, which the short run leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> EngineBackend:
    return EngineBackend(load(EngineConfig(device="cpu")), "smollm2")


@pytest.fixture
def asker(backend: EngineBackend) -> Iterator[Asker]:
    backend.engine.scheduler.prefix.clear()
    yield Asker(backend)
    for name in list(backend.engine._by_id):
        backend.abort(name)
    backend.engine._ended.clear()


def test_a_sound_model_passes_all_and_nothing_of_it_is_counted(backend: EngineBackend) -> None:
    found = {finding.probe: finding for finding in run_probes(backend)}
    assert len(found) == 7
    coded = found.pop("coded cache within its bound")
    assert (coded.status, coded.detail) == ("skipped", "keys and values are not coded")
    assert {finding.status for finding in found.values()} == {PASSED}, found
    assert backend.status().drafting["num_spec_steps"] == 0


def test_a_budget_that_is_spent_is_said(backend: EngineBackend) -> None:
    found = run_probes(backend, budget=-1)
    assert {finding.status for finding in found} == {"skipped"} and "without a limit" in found[0].detail


# ---- faults


def test_wrong_drafts_that_are_accepted_are_found(asker: Asker, monkeypatch: Patch) -> None:
    monkeypatch.setattr(host_steps, "committed", lambda drafts, samples: [*drafts[:1], samples[-1]][-len(samples) :])
    with pytest.raises(Failed, match=r"plain text says .* and drafted text says"):
        probes.drafted_is_plain(asker)


@pytest.mark.parametrize("stale", [slow(0), 1, slow(2)])
def test_a_stale_block_in_the_prefix_cache_is_found(asker: Asker, monkeypatch: Patch, stale: int) -> None:
    """One block of the hit holds the rows of another text."""
    honest, engine = PrefixCache.lookup_waiting, asker.backend.engine  # type: ignore[attr-defined]
    other = engine.pool.allocate()
    with torch.inference_mode():
        for layer in engine.runner.kv.layers:
            layer.k[other], layer.v[other] = layer.k[other - 1], layer.v[other - 1]

    def lookup(cache: PrefixCache, *asked: Any) -> Hit:
        hit = honest(cache, *asked)
        if len(hit.blocks) > stale:
            hit.blocks[stale] = other
        return hit

    monkeypatch.setattr(PrefixCache, "lookup_waiting", lookup)
    try:
        with pytest.raises(Failed, match="computed"):
            probes.hit_is_cold(asker)
    finally:
        engine.pool.release([other])


@pytest.mark.parametrize("every", [slow(1), 12])
def test_a_sampler_that_chooses_another_token_is_found(asker: Asker, monkeypatch: Patch, every: int) -> None:
    engine, count = asker.backend.engine, 0  # type: ignore[attr-defined]
    honest = engine.sampler.__call__

    def second_best(logits: torch.Tensor, rows: Any) -> Sampled:
        nonlocal count
        count += 1
        sampled = honest(logits, rows)
        if count % every == 0 and len(logits):
            sampled.ids = logits.topk(2, dim=-1).indices[:, 1]
        return sampled

    monkeypatch.setattr(engine.steps, "_sampler", _Calls(engine.sampler, second_best))
    with pytest.raises(Failed, match="less likely than the likeliest"):
        probes.sampler_is_honest(asker)


def test_a_sampler_that_lies_about_probabilities_is_found(asker: Asker, monkeypatch: Patch) -> None:
    honest = Sampled.report

    def report(sampled: Sampled, first: int, chosen: list[int]) -> list[TokenLogprob] | None:
        rows = honest(sampled, first, chosen)
        return [replace(row, logprob=row.logprob / 2 - 0.5) for row in rows] if rows else rows

    monkeypatch.setattr(Sampled, "report", report)
    with pytest.raises(Failed, match="is reported with the log-probability"):
        probes.sampler_is_honest(asker)


def test_a_sampler_that_ignores_top_k_is_found(asker: Asker, monkeypatch: Patch) -> None:
    engine = asker.backend.engine  # type: ignore[attr-defined]
    honest = engine.sampler.__call__

    def unfiltered(logits: torch.Tensor, rows: Any) -> Sampled:
        hot = replace(rows[0].request.params, top_k=0, temperature=20.0)
        changed = (
            [row._replace(request=_Like(row.request, hot)) for row in rows] if rows[0].request.params.top_k else rows
        )
        return honest(logits, changed)

    monkeypatch.setattr(engine.steps, "_sampler", _Calls(engine.sampler, unfiltered))
    with pytest.raises(Failed, match="text with top_k 1 says"):
        probes.sampler_is_honest(asker)


def test_a_grammar_that_masks_nothing_is_found(asker: Asker, monkeypatch: Patch) -> None:
    steps = asker.backend.engine.steps  # type: ignore[attr-defined]
    honest = steps._sample_rows
    monkeypatch.setattr(steps, "_sample_rows", lambda batch: [row._replace(grammar=None) for row in honest(batch)])
    with pytest.raises(Failed, match="under a schema"):
        probes.grammar_holds(asker)


def test_a_grammar_that_forgets_its_schema_is_found(asker: Asker, monkeypatch: Patch) -> None:
    honest = asker.backend.compile_grammar
    loose = GrammarSpec("json_schema", '{"enum": [{"nick": "x"}]}')
    monkeypatch.setattr(asker.backend, "compile_grammar", lambda spec: honest(loose))
    with pytest.raises(Failed, match="does not follow its schema"):
        probes.grammar_holds(asker)


class Deaf(GenericParser):
    """Reads no call."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)]

    def finish(self) -> list[Event]:
        return []


class Dropping(GenericParser):
    """Loses the quotes of arguments."""

    def feed(self, text: str) -> list[Event]:
        events = super().feed(text)
        return [replace(e, text=e.text.replace('"', "")) if isinstance(e, ToolArguments) else e for e in events]


@pytest.mark.parametrize(("parser", "said"), [(Deaf, "generic parser does not read"), (Dropping, "are not JSON")])
def test_a_broken_tool_parser_is_found(asker: Asker, monkeypatch: Patch, parser: Any, said: str) -> None:
    monkeypatch.setattr(Generic, "parser", lambda form, tools: parser(tools))
    with pytest.raises(Failed, match=said):
        call_is_read(asker)


def test_a_forced_call_that_is_read_as_text_is_found() -> None:
    with pytest.raises(Failed, match="reads the calls: none; content: 'x'"):
        read_call([Content("x")], "x")


def test_a_parser_that_is_not_the_templates_is_found(asker: Asker) -> None:
    """The template writes calls in tags; a server was told to read another format."""
    calls = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function|tojson }}\n</tool_call>{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}"
    asker.info = replace(asker.info, chat_template=template)
    assert "the chat template writes" in call_is_read(asker, "hermes")
    with pytest.raises(Failed, match=r"(?s)writes a call as '<tool_call>.*which the gemma4 parser does not read"):
        call_is_read(asker, "gemma4")


def test_a_context_that_is_cut_is_found_by_the_needle(asker: Asker, monkeypatch: Patch) -> None:
    """Attention forgets what is more than 64 tokens back once a context has more than 200."""
    honest = DenseLayer.attend

    def attend(layer: DenseLayer, q: torch.Tensor, view: Any, params: Any) -> torch.Tensor:
        return honest(layer, q, view, replace(params, window=64) if view.max_context > 200 else params)

    monkeypatch.setattr(DenseLayer, "attend", attend)
    with pytest.raises(Failed, match="among 96 tokens the model finds it"):
        needle_is_found(asker)


def test_a_model_that_finds_nothing_at_all_is_not_blamed(asker: Asker, monkeypatch: Patch) -> None:
    honest = DenseLayer.attend
    monkeypatch.setattr(
        DenseLayer, "attend", lambda layer, q, view, params: honest(layer, q, view, replace(params, window=8))
    )
    with pytest.raises(Skipped, match="longer texts would tell nothing"):
        needle_is_found(asker)


def test_an_error_within_a_probe_is_a_failure_and_the_others_run(backend: EngineBackend, monkeypatch: Patch) -> None:
    monkeypatch.setattr(backend.engine, "_commit", lambda *rows: 1 / 0)
    monkeypatch.setattr(
        "sparkdraft.operate.canary.run.all_probes", lambda parser: [("a", "", probes.grammar_holds)] * 2
    )
    found = run_probes(backend)
    assert [finding.status for finding in found] == [FAILED, FAILED] and "ZeroDivisionError" in found[0].detail
    assert not backend.has_work


# ---- what follows


def test_parts_that_failed_are_off_until_they_are_switched_on(backend: EngineBackend, asker: Asker) -> None:
    params = SamplingParams(max_tokens=12, num_draft=3, ignore_eos=True)

    def used() -> tuple[bool, bool]:
        answer = asker.ask(asker.encode(probes.COUNTED), params)
        return answer.drafting["num_draft_tokens"] > 0, answer.num_cached > 0

    switch_off(backend, [Finding("a", FAILED, "", DRAFTING), Finding("b", FAILED, "", PREFIX_CACHE)])
    try:
        assert used() == used() == (False, False)
    finally:
        for part in (DRAFTING, PREFIX_CACHE):
            backend.switch(part, True)
    assert used() == (True, False) and used() == (True, True)


class _Calls:
    """A sampler whose call is replaced."""

    def __init__(self, sampler: Any, call: Any) -> None:
        self._sampler, self._call = sampler, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Like:
    """A request with other parameters."""

    def __init__(self, request: Any, params: Any) -> None:
        self._request, self.params = request, params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
