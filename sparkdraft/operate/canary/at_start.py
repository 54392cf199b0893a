"""The canary at the start of a server: loads a backend, asks it all probes, and lets it go on without what failed."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

from sparkdraft.backend import Backend, LoadBackend, ModelInfo, Report
from sparkdraft.cache.formats import as_exact
from sparkdraft.operate.canary.findings import CODED_CACHE, FAILED, Finding, failures
from sparkdraft.operate.canary.run import run_probes, switch_off

BUDGET = 5.0  # seconds; all probes of the embedded model take 6 s of one core's time


class Canary:
    """Asks a loaded backend the probes of sparkdraft/canary. What fails is said aloud and goes on without."""

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
        """The backend's own, with what was found."""
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
    """The info of an engine that runs without its canary, because the one before it died under the probes."""
    detail = f"the engine died under the canary's probes ({reason}) and runs without them, as with --no-canary"
    finding = Finding("the engine survives the canary", FAILED, f"{detail}: its answers are unchecked")
    told = {"name": "the canary is off", "reason": detail}
    return replace(info, canary=[*info.canary, finding.as_dict()], fallbacks=[*info.fallbacks, told])


def release() -> None:
    """Return the memory of a backend that nothing refers to any more."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()  # else the next one counts it as used


def named(finding: Finding) -> str:
    """What a failed probe means for users."""
    if finding.part == CODED_CACHE:
        return f"{finding.part} is off: keys and values are kept exactly"
    return f"{finding.part} is off" if finding.part else "answers may be wrong"
