"""Predictions for figures.json: what `sparkdraft plan` would have said of each."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.operate.forecast.forecast import CLASSES, MANY, Range
from sparkdraft.operate.forecast.machine import find_machine, known_machines
from sparkdraft.operate.forecast.roofline import Load, Rates, Target, step
from sparkdraft.plan.weight_formats import WeightFormats
from sparkdraft.speculation.costs import expected_tokens
from tests.operate.forecast.published import DRAFTERS, MODELS

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("figures.json").read_text(encoding="utf-8"))
FIGURES: list[dict[str, Any]] = DATA["figures"]


def speed(figure: dict[str, Any]) -> float:
    """Tokens per second, all streams together."""
    tokens = figure.get("tokens", 1.0)
    if "tokens_as_at" in figure:
        context, measured = figure["tokens_as_at"]
        tokens = measured * seconds(figure | {"context": context})
    return float(figure["streams"] * tokens / seconds(figure))


MACHINES = {name: find_machine(name) for name in known_machines()}


@cache
def target(model: str, weights: str, kv: str, itemsize: int, spread: float | None) -> Target:
    return Target.of(MODELS[model], WeightFormats.parse(weights), kv, itemsize, spread)


def seconds(figure: dict[str, Any]) -> float:
    machine = MACHINES[figure["machine"]]
    rates, depth = machine.rates, figure.get("depth", 0)
    if "bandwidth_gb_s" in figure:  # as measured beside the figure
        rates = Rates(figure["bandwidth_gb_s"] * 1e9, rates.arithmetic)
    itemsize = 4 if machine.hardware.device == "cpu" else 2
    kind = (figure["model"], figure["weights"], figure.get("kv", "exact"), itemsize, figure.get("spread"))
    drafter = DRAFTERS[figure["drafter"]] if depth else None
    losses = machine.losses(figure["engine"]).expected
    return step(rates, losses, target(*kind), Load(figure["streams"], figure["context"], depth), drafter).total


def ratio(figure: dict[str, Any]) -> float:
    """Predicted over measured; of a range, over what is nearest in it."""
    predicted, (low, high) = speed(figure), figure["measured"]
    return predicted / min(max(predicted, low), high)


def assumed(figure: dict[str, Any]) -> Range:
    """What is predicted where nobody states an acceptance: by the class of text, with its range and the model's own."""
    error, depth = MACHINES[figure["machine"]].losses(figure["engine"]).error, figure["depth"]
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in MODELS[figure["model"]].layers)
    share = error.experts if has_experts or figure["streams"] >= MANY else error.dense
    usual, low, high = (
        speed(figure | {"tokens": expected_tokens([chance] * depth)[depth]}) for chance in CLASSES[figure["text"]]
    )
    return Range(usual, low * (1 - share), high * (1 + share))


def table() -> str:
    """How far predictions are off, by set, as docs/plan.md has it."""
    heads = "| figures | count | fitted | median error | within 20 % | predicted / measured |"
    rows = [heads, "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(figure["set"] for figure in FIGURES):
        found = [figure for figure in FIGURES if figure["set"] == name]
        ratios = [ratio(figure) for figure in found]
        errors = [abs(each - 1) for each in ratios]
        fitted, near = sum(bool(each.get("fitted")) for each in found), sum(error <= 0.2 for error in errors)
        cells = (name, len(found), fitted, f"{statistics.median(errors):.1%}", f"{near / len(found):.0%}")
        rows.append(f"| {' | '.join(map(str, cells))} | {min(ratios):.2f} to {max(ratios):.2f} |")
    return "\n".join(rows).replace("%", " %").replace("20  %", "20 %")


if __name__ == "__main__":
    print(table())
