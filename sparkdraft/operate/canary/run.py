"""Runs all probes of a backend, one after another, and switches off what failed.

A probe that raises anything else than it should has found a bug too: it fails, with the error as its detail, and the
others still run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from sparkdraft.backend import DRAFTING, PREFIX_CACHE, Backend
from sparkdraft.operate.canary import probes
from sparkdraft.operate.canary.asker import Asker
from sparkdraft.operate.canary.findings import (
    CODED_CACHE,
    FAILED,
    GRAMMARS,
    PASSED,
    SKIPPED,
    TOOLS,
    Failed,
    Finding,
    Skipped,
    failures,
)
from sparkdraft.operate.canary.needle import needle_is_found
from sparkdraft.operate.canary.tool_call import call_is_read
from sparkdraft.text.families import AUTO

Probe = Callable[[Asker], str]  # what was seen, in words; raises Failed or Skipped


def all_probes(tool_parser: str = AUTO) -> list[tuple[str, str, Probe]]:
    """Name, part to blame and probe. The cache's codes come first: they must be measured while no block is needed."""
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
    """Ask everything. Nobody else may use the backend meanwhile; afterwards its counts are those of users alone.

    budget: seconds after which no further probe is begun.
    """
    asker, todo, found = Asker(backend), all_probes(tool_parser), []
    deadline = time.monotonic() + budget
    for done, (name, part, probe) in enumerate(todo):
        report(done, len(todo))
        begin = time.monotonic()
        status, detail = SKIPPED, f"the {budget:g} s are over; `sparkdraft check` asks without a limit"
        if begin <= deadline:
            status, detail = _run(probe, asker)
        found.append(Finding(name, status, detail, part, round(time.monotonic() - begin, 2)))
    backend.reset_counts()
    return found


def switch_off(backend: Backend, findings: Sequence[Finding]) -> None:
    """Let the backend do without the parts that failed, as far as it can: the rest is up to its caller."""
    for finding in failures(findings):
        if finding.part in (DRAFTING, PREFIX_CACHE):
            backend.switch(finding.part, False)


def _run(probe: Probe, asker: Asker) -> tuple[str, str]:
    try:
        return PASSED, probe(asker)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except Failed as reason:
        return FAILED, str(reason)
    except Exception as error:
        traceback.print_exc()
        asker.backend.fail_batch(error)  # a step may be left half done; raises if the backend cannot go on
        return FAILED, f"the probe met an error: {type(error).__name__}: {error}"
