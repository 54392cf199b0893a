"""What comparisons of formats (`bench kv`, `bench weights`) share: checks, the table of texts, and its plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdraft.core import UserError
from sparkdraft.util.progress import SELDOM, progress

if TYPE_CHECKING:
    from sparkdraft.operate.bench.formats import Comparison, Measured
    from sparkdraft.operate.bench.offline import Ceilings
    from sparkdraft.plan.resolve import Plan
    from sparkdraft.util.plot import Panel
    from sparkdraft.weights.checkpoint import Checkpoint

LEAST_TOKENS = 16
STRETCH = 128  # positions per point of the plot


def check_tokens(tokens: int) -> None:
    if tokens < LEAST_TOKENS:
        raise UserError(f"--tokens is {tokens}; it must be at least {LEAST_TOKENS}")


def check_plot(name: str) -> None:
    plot = Path(name).absolute()
    if name and (plot.is_dir() or not plot.parent.is_dir()):
        raise UserError(f"--plot is {name}; give a file in a folder that exists")


def comparison_of(tokens: int, plan: Plan, checkpoint: Checkpoint) -> Comparison:
    from sparkdraft.operate.bench.formats import Comparison, read_texts
    from sparkdraft.text.tokenizer import Tokenizer

    if tokens >= plan.max_model_len:
        raise UserError(
            f"--tokens is {tokens}; the context holds {plan.max_model_len} with one of output: ask for fewer"
        )
    return Comparison(read_texts(Tokenizer.of(checkpoint), tokens))


def ceilings_of(plan: Plan) -> Ceilings:
    from sparkdraft.operate.bench.offline import Ceilings

    with progress("measuring this machine", redraw=SELDOM):
        return Ceilings.measure(plan.device, plan.threads)


def text_header(comparison: Comparison) -> str:
    kinds = [f"{f'{kind}, {len(ids)} tokens':<28}" for kind, ids in comparison.texts.items()]
    columns = [f"{'perplexity':>10} {'rise':>8} {'KL':>8}"] * len(kinds)
    return "\n".join(
        ["  ".join([f"{'':19}", *kinds, "all"]), "  ".join([f"{'format':<19}", *columns, f"{'rise':>8} {'KL':>8}"])]
    )


def text_line(name: str, own: Measured, base: Measured) -> str:
    cells = [
        f"{reading.perplexity:10.3f} {percent(reading.rise(base.readings[kind]))} {reading.mean_kl:8.5f}"
        for kind, reading in own.readings.items()
    ]
    return "  ".join([f"{name:<19}", *cells, f"{percent(own.rise(base))} {own.kl:8.5f}"])


def text_legend(base: str) -> str:
    return (
        f"rise: increase of the perplexity over {base}; all: geometric mean over the texts. KL: divergence of the next "
        f"token's distribution from that of {base}, in nats, mean over positions"
    )


def percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}".replace("%", " %").rjust(8)  # never -0.0


def nearness_panels(others: Mapping[str, Measured], base: Measured, base_name: str) -> list[Panel]:
    """Rise and divergence by position; none without texts."""
    from sparkdraft.operate.bench.formats import kl_by_position, rise_by_position
    from sparkdraft.util.plot import Line, Panel

    if not base.readings or not others:
        return []
    rises = {name: rise_by_position(each.readings, base.readings, STRETCH) for name, each in others.items()}
    lines = [Line(name, [(at, 100 * rise) for at, rise in points]) for name, points in rises.items()]
    risen = Panel("perplexity of the texts up to a position", lines, "tokens", f"rise against {base_name}, %")
    lines = [Line(name, kl_by_position(each.readings.values(), STRETCH)) for name, each in others.items()]
    title = f"divergence from the distribution of {base_name}"
    return [risen, Panel(title, lines, "position in the text", "KL, nats, mean over the texts")]
