"""The report of `sparkdraft plan`, as text and for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sparkdraft.operate.forecast.advice import Advice, Alternative
from sparkdraft.operate.forecast.forecast import Chances, Drafted, Forecast, Range
from sparkdraft.plan.weight_formats import BYTES, KEPT_ON_GPU

GIB = 2**30


@dataclass(frozen=True)
class Report:
    forecast: Forecast
    advice: Advice
    alternatives: list[Alternative]
    drafter: str  # as the user named it
    weights: str  # formats, in words

    def text(self) -> str:
        question = self.forecast.question
        drafter = f"drafter {self.drafter}" if self.forecast.drafter else "no drafter"
        title = f"{question.config.model} on {question.machine.title}"
        lines = [f"{title}: weights {self.weights}, K/V {question.config.kv}, {drafter}", ""]
        lines += [*self._memory(), "", *self._speed(), ""]
        if self.alternatives:
            lines += [*self._alternatives(), ""]
        return "\n".join([*lines, f"recommended: {self.advice.sentence()}"])

    # ---- the tables

    def _memory(self) -> Iterator[str]:
        forecast, plan = self.forecast, self.forecast.plan
        machine = forecast.question.machine
        is_shared = machine.unified and machine.hardware.device == "cuda"
        yield "memory, as `serve` would plan it"
        for label, size in forecast.memory.items():
            yield f"  {label:<34}{size / GIB:9.2f} GiB"
        free = "that CPU and GPU share" if is_shared else "free"
        yield f"  {'together':<34}{plan.memory.total / GIB:9.2f} GiB of {plan.memory.free / GIB:.2f} {free}"
        left = "left to the system and to other programs" if machine.unified else "left free"
        yield f"  {'head room':<34}{forecast.head_room / GIB:9.2f} GiB {left}"
        held, context = plan.num_blocks * plan.block_size, forecast.question.context
        yield f"  tokens of context that fit: {forecast.max_tokens:,}; streams of {context:,}: {forecast.max_streams:,}"
        yield f"  (the plan has room for {held:,} tokens in at most {plan.max_seqs} request{'s' * (plan.max_seqs > 1)})"

    def _speed(self) -> Iterator[str]:
        forecast, question, runs = self.forecast, self.forecast.question, self.forecast.running()
        if not runs:
            fits = f"{forecast.max_tokens:,} tokens of context fit"
            yield f"speed: none, because no stream of {question.context:,} tokens can run: {fits}"
            return
        many = "streams" if runs > 1 else "stream"
        yield f"speed, {runs:,} {many} of {question.context:,} tokens: tok/s together, ms per step"
        if not forecast.holds_all:
            yield f"  NOT ALL FIT AT ONCE: {runs:,} of {question.streams:,} streams run, and the others wait for them"
        heads = "".join(f"{head:>8}" for head in ("drafts", "tokens", "tok/s", "low", "high"))
        of_drafts = "text (chance of each draft)" if forecast.by_class else ""
        yield f"  {of_drafts:<32}{heads}   step = weights + K/V + states + drafter + fixed"
        yield self._speed_line("plain", 0, 1.0, forecast.plain)
        for name, each in forecast.by_class.items():
            usual, low, high = forecast.chances[name]
            chance = f"{usual:.2f}, {low:.2f} to {high:.2f}" if low < high else f"{usual:.2f} per draft"
            yield self._speed_line(f"{name} ({chance})", each.depth, each.tokens, each.speed)
        if forecast.depths:
            depth = forecast.middle.depth if forecast.middle and forecast.middle.depth else forecast.depths[0]
            chance = f"a chance of {forecast.least_chance:.2f}" if forecast.least_chance else "no chance"
            pays = f"{forecast.break_even(depth):.2f} tokens per step at {depth} draft{'s' * (depth > 1)}"
            yield f"  drafting pays from {pays}, and at its best depth from {chance} of each draft"
        seconds = forecast.seconds()
        if seconds.fixed > seconds.total / 2:
            yield "  most of a step are launches, the least certain part: it may be slower by up to a half"
        machine = question.machine
        yield f"  {machine.rates.bandwidth / 1e9:.0f} GB/s; the engine's losses: {machine.losses().origin}"

    def _speed_line(self, name: str, depth: int, tokens: float, speed: Range) -> str:
        seconds = self.forecast.seconds(depth)
        shown = " + ".join(f"{part * 1e3:.1f}" for part in asdict(seconds).values())
        rates = "".join(f"{value:8.1f}" for value in speed)
        return f"  {name:<32}{depth:8}{tokens:8.2f}{rates}   {seconds.total * 1e3:.1f} = {shown}"

    def _alternatives(self) -> Iterator[str]:
        yield "alternatives: those that hold all streams first, the fastest first"
        heads = f"{'tok/s':>8}{'GiB without K/V':>17}{'tokens that fit':>17}{'streams':>9}"
        yield f"  {'weights':<22}{'K/V':<12}{'drafts':<8}{heads}"
        for each in self.alternatives:
            start = f"  {each.weights:<22}{each.kv:<12}{'yes' if each.drafter else 'no':<8}"
            found = each.forecast
            if found:
                fixed = (found.plan.memory.total - found.plan.memory.kv) / GIB
                speed = f"{each.tok_s:.1f}" if found.running() else "-"
                yield f"{start}{speed:>8}{fixed:17.1f}{found.max_tokens:17,}{found.max_streams:9,}"
            else:
                yield f"{start}       -  {each.refusal}"
        kinds = {each.weights for each in self.alternatives if each.weights in BYTES}
        if unread := sorted(kinds - {*KEPT_ON_GPU, "quantised"}):
            yield f"  (no GPU kernel of this engine reads {' or '.join(unread)} yet: sums, not what would run)"

    # ---- JSON

    def _recommended(self) -> dict[str, Any]:
        advice = self.advice
        known = {"kv": advice.kv, "drafts": advice.drafts, "drafter": advice.drafter, "max_seqs": advice.max_seqs}
        return known | {"runs": advice.runs, "why": list(advice.reasons)}

    def as_dict(self) -> dict[str, Any]:
        forecast, question, middle = self.forecast, self.forecast.question, self.forecast.middle
        best, runs = middle.speed if middle else forecast.plain, forecast.running()
        sums = {"total": forecast.plan.memory.total, "free": forecast.plan.memory.free, "head room": forecast.head_room}
        drafts = bool(middle and middle.depth)
        seconds = forecast.seconds()
        return {
            "plan": question.config.model,
            "machine": question.machine.name,
            "bandwidth_gb_s": round(question.machine.rates.bandwidth / 1e9, 1),
            "weights": self.weights,
            "kv": question.config.kv,
            "drafter": self.drafter if forecast.drafter else None,
            "streams": question.streams,
            "context": question.context,
            "memory_gib": {name: round(size / GIB, 3) for name, size in (forecast.memory | sums).items()},
            "max_tokens": forecast.max_tokens,
            "max_streams": forecast.max_streams,
            "holds_all": forecast.holds_all,
            "running": runs,  # streams, whose speeds follow
            "plain_tok_s": round(forecast.plain.expected, 2) if runs else None,
            "drafted_tok_s": round(middle.speed.expected, 2) if middle and runs else None,
            "low": round(best.low, 2) if runs else None,
            "high": round(best.high, 2) if runs else None,
            "best_depth": middle.depth if middle else 0,
            "break_even_tokens": round(forecast.break_even(middle.depth), 3) if middle and drafts else None,
            "break_even_chance": forecast.least_chance if forecast.depths else None,
            "plain_step_ms": {name: round(part * 1e3, 3) for name, part in asdict(seconds).items() if runs},
            "by_class": {
                name: _drafted(each, forecast.chances[name]) for name, each in forecast.by_class.items() if runs
            },
            "recommended": self._recommended(),
            "alternatives": [_alternative(each) for each in self.alternatives],
        }


def _drafted(each: Drafted, chances: Chances) -> dict[str, float]:
    known = {
        name: round(chance, 4) for name, chance in zip(("chance", "chance_low", "chance_high"), chances, strict=True)
    }
    known |= {"depth": each.depth, "tokens_per_step": round(each.tokens, 3)}
    rates = zip(("tok_s", "low", "high"), each.speed, strict=True)
    return known | {name: round(value, 2) for name, value in rates}


def _alternative(each: Alternative) -> dict[str, Any]:
    known: dict[str, Any] = {"weights": each.weights, "kv": each.kv, "drafts": each.drafter}
    if not each.forecast:
        return known | {"refused": each.refusal}
    found = {"max_tokens": each.forecast.max_tokens, "max_streams": each.forecast.max_streams}
    speed = round(each.tok_s, 2) if each.forecast.running() else None
    return known | {"tok_s": speed, **found, "holds_all": each.holds_all}
