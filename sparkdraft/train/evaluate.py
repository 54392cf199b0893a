"""How good a drafter is: tokens per step by class of prompt, greedy and sampled, with and without the target's loops.

This is the measurement of `sparkdraft bench accept` (operate/bench/accept.py), at the drafter's full depth and
without n-grams, so that only the drafter is judged. cli/train.py loads models and prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM
from sparkdraft.operate.bench import accept
from sparkdraft.weights.loader import Progress

TEMPERATURES = (0.0, 0.7)


def evaluate(
    llm: LLM,
    prompts: Mapping[str, Sequence[str]],  # by class, as from accept.read_prompts
    output_len: int = 384,
    temperatures: Sequence[float] = TEMPERATURES,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The report, ready for JSON: one group per temperature, with its classes and 'all' as operate/bench/accept.py
    counts them."""
    drafting = llm.engine.drafting
    if drafting.proposer is None:
        raise UserError("There is no drafter to evaluate; name one with --drafter, and leave --spec on auto")
    ids = {name: accept.chat_prompts(llm, each) for name, each in prompts.items()}
    count, groups = sum(map(len, ids.values())), []
    ngram, drafting.ngram = drafting.ngram, False
    try:
        for i, temperature in enumerate(temperatures):
            params = SamplingParams(output_len, temperature=temperature, seed=0, num_draft=drafting.max_depth)
            told = partial(_tell, progress, i * count, len(temperatures) * count)
            rows = accept.over_classes(partial(accept.measure, llm, params), ids, told)
            classes = {name: row.as_dict() for name, row in rows.items()}
            groups.append({"temperature": temperature, accept.ALL: classes.pop(accept.ALL), "classes": classes})
    finally:
        drafting.ngram = ngram
    return {"depth": drafting.max_depth, "output_len": output_len, "groups": groups}


def table(report: Mapping[str, Any]) -> str:
    """The report of `evaluate` as text: lengths by class, then acceptance by position over all classes."""
    lines = []
    for group in report["groups"]:
        lines += [f"temperature {group['temperature']:g}", "class     prompts  tokens  steps  length  no loops"]
        for name, row in [*group["classes"].items(), (accept.ALL, group[accept.ALL])]:
            length, cut = (row[f"mean_acceptance_length{end}"] or 0 for end in ("", "_no_loops"))
            counts = f"{row['prompts']:7}  {row['tokens']:6}  {row['num_spec_steps']:5}"
            lines.append(f"{name:<9} {counts}  {length:6.2f}  {cut:8.2f}")
        for label, key in (("by position", "per_position"), ("  no loops", "per_position_no_loops")):
            shares = " ".join("-" if share is None else f"{share:.3f}" for share in group[accept.ALL][key])
            lines.append(f"{label:<12} {shares}")
        lines.append("")
    return "\n".join(lines[:-1])


def _tell(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)
