"""Runs all probes of a backend, one after another, and switches off what failed.

A probe that raises an unexpected error fails, with the error as its detail, and the others still run.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from sparkdraft.backend import DRAFTING, PREFIX_CACHE, Backend, LoadBackend, ModelInfo, Report
from sparkdraft.cache.formats import as_exact
from sparkdraft.operate.canary import probes
from sparkdraft.operate.canary.findings import CODED_CACHE, FAILED, GRAMMARS, TOOLS, Finding, ask_all, failures
from sparkdraft.operate.canary.probes import Asker, call_is_read, needle_is_found
from sparkdraft.text.families import AUTO

Probe = Callable[[Asker], str]  # what was seen, in words; raises Failed or Skipped


def all_probes(tool_parser: str = AUTO) -> list[tuple[str, str, Probe]]:
    """Return name, part to blame and probe. The coded cache comes first: it is measured while no block is in use."""
    return [
        ("coded cache within its bound", CODED_CACHE, probes.codes_are_within_bounds),
        ("sampler is honest", "", probes.sampler_is_honest),
        ("drafted text is plain text", DRAFTING, probes.drafted_is_plain),
        ("prefix hit is as cold", PREFIX_CACHE, probes.hit_is_cold),
        ("grammar holds", GRAMMARS, probes.grammar_holds),
        ("tool call is read", TOOLS, partial(call_is_read, tool_parser=tool_parser)),
        ("needle is found", "", needle_is_found),
    ]


def run_probes(
    backend: Backend,
    tool_parser: str = AUTO,
    report: Callable[[int, int], None] = lambda done, total: None,
    budget: float = inf,
) -> list[Finding]:
    """Run all probes. Nobody else may use the backend meanwhile; its counts are reset afterwards. budget: seconds after
    which no probe begins."""
    asker = Asker(backend)

    def broken(error: Exception) -> str:
        traceback.print_exc()
        backend.fail_batch(error)  # a step may be left half done; raises if the backend cannot go on
        return f"the probe met an error: {type(error).__name__}: {error}"

    todo = [(name, part, partial(probe, asker)) for name, part, probe in all_probes(tool_parser)]
    found = ask_all(todo, report, budget, broken)
    backend.reset_counts()
    return found


def switch_off(backend: Backend, findings: Sequence[Finding]) -> None:
    """Switch off the failed parts that the backend can do without; the caller handles the rest."""
    for finding in failures(findings):
        if finding.part in (DRAFTING, PREFIX_CACHE):
            backend.switch(finding.part, False)


# ---- at the start of a server

BUDGET = 5.0  # seconds; all probes of the embedded model take 6 s of one core's time


class Canary:
    """Loads a backend and runs the probes; the backend goes on without the parts that failed."""

    def __init__(self, load: LoadBackend, options: dict[str, Any], report: Report, tool_parser: str | None) -> None:
        """tool_parser: how calls are read; None: no canary."""
        self._load, self._options, self._report, self._tool_parser = load, options, report, tool_parser
        self.findings: list[Finding] = []

    def load(self) -> Backend:
        backend = self._load(self._options, self._report)
        if self._tool_parser is None:
            return backend
        self.findings = self._ask(backend)
        coded = next((f for f in failures(self.findings) if f.part == CODED_CACHE), None)
        if coded:  # its format cannot be changed while it runs
            del backend
            release()
            backend = self._load(as_exact(self._options), self._report)
            again = [f for f in self._ask(backend) if f.part != CODED_CACHE or f.status == FAILED]
            # Codes that fail once more are still in use: nothing was switched off for them.
            self.findings = [coded, *(replace(f, part="") if f.part == CODED_CACHE else f for f in again)]
        switch_off(backend, self.findings)
        return backend

    def info(self, backend: Backend) -> ModelInfo:
        """Return the backend's info with the findings."""
        told = [{"name": named(f), "reason": f"the canary's probe '{f.probe}' failed: {f.detail}"} for f in self.broken]
        info = backend.info
        found = [finding.as_dict() for finding in self.findings]
        return replace(info, canary=found, fallbacks=[*info.fallbacks, *told])

    @property
    def broken(self) -> list[Finding]:
        return failures(self.findings)

    def _ask(self, backend: Backend) -> list[Finding]:
        assert self._tool_parser is not None
        found = run_probes(backend, self._tool_parser, lambda done, total: self._report("canary", done, total), BUDGET)
        for finding in failures(found):
            print(f"CANARY FAILED: {finding.probe}: {finding.detail} ({named(finding)})", file=sys.stderr, flush=True)
        return found


def unchecked(info: ModelInfo, reason: str) -> ModelInfo:
    """The info of an engine that runs without its canary because the one before it died under the probes."""
    detail = f"the engine died under the canary's probes ({reason}) and runs without them, as with --no-canary"
    finding = Finding("the engine survives the canary", FAILED, f"{detail}: its answers are unchecked")
    told = {"name": "the canary is off", "reason": detail}
    return replace(info, canary=[*info.canary, finding.as_dict()], fallbacks=[*info.fallbacks, told])


def release() -> None:
    """Free the memory of a backend that nothing refers to any more."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()  # else the next one counts it as used


def named(finding: Finding) -> str:
    """Say what a failed probe means for users."""
    if finding.part == CODED_CACHE:
        return f"{finding.part} is off: keys and values are kept exactly"
    return f"{finding.part} is off" if finding.part else "answers may be wrong"
