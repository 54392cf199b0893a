"""Recommends a KV format, drafting and batch size, with reasons, and ranks all alternatives. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkdraft.cache.formats import EXACT, kv_formats, kv_names
from sparkdraft.core import UserError
from sparkdraft.operate.forecast.forecast import Forecast, Question
from sparkdraft.plan.resolve import MAX_SEQS
from sparkdraft.plan.weight_formats import FLOATS, WeightFormats

GAIN = 1.1  # how much faster a K/V format that is not exact must be to be taken for its speed
PAYS = 1.03  # how much faster drafted steps must be: as much as the engine itself asks for (speculation/budget.py)
SMALLER = ("fp8", "nvfp4")  # formats of weights that are compared with what is asked for, on a GPU


@dataclass(frozen=True)
class Advice:
    kv: str
    drafts: bool
    reasons: tuple[str, ...]
    drafter: bool = True  # False: it is left out for the memory that it takes
    max_seqs: int = 0  # 0: as many requests at once as `serve` runs by itself
    runs: bool = True  # False: not one stream fits, whatever is chosen

    @property
    def flags(self) -> str:
        drafts = "" if self.drafts else " --spec off" if self.drafter else " --drafter none"
        return f"--kv {self.kv}{drafts}" + (f" --max-seqs {self.max_seqs}" if self.max_seqs else "")

    def sentence(self) -> str:
        start = f"Serve it with {self.flags}" if self.runs else "This cannot be served"
        return f"{start}: {'; '.join(self.reasons)}."


@dataclass(frozen=True)
class Alternative:
    weights: str
    kv: str
    drafter: bool
    forecast: Forecast | None
    refusal: str = ""  # why there is no forecast

    @property
    def tok_s(self) -> float:
        """Tokens per second; of the middle class of text with a drafter."""
        if not self.forecast:
            return 0.0
        middle = self.forecast.middle if self.drafter else None
        return middle.speed.expected if middle else self.forecast.plain.expected

    @property
    def holds_all(self) -> bool:
        return self.forecast is not None and self.forecast.holds_all


def with_kv(question: Question, kv: str) -> Question:
    return replace(question, config=replace(question.config, kv=kv))


def tried(question: Question) -> tuple[Forecast | None, str]:
    """Return a forecast, or None and the reason."""
    try:
        return Forecast(question), ""
    except UserError as error:
        return None, str(error)


def without_drafter(question: Question) -> Question:
    config = replace(question.config, drafter_weights="auto", draft_vocab="")
    return replace(question, drafter=None, chances=None, config=config)


def recommend(asked: Forecast) -> Advice:
    """Choose the KV format and whether to draft, for the asked machine, weights and load."""
    question, why_not = asked.question, _in_the_way(asked)
    if why_not:
        question = without_drafter(question)
    kv, why_kv = _choose_kv(question)
    chosen = tried(with_kv(question, kv))[0] or asked
    if not chosen.running():
        most = max(_each_kv(without_drafter(question)), key=lambda each: each.max_tokens)
        fits = f"no stream of {question.context:,} tokens fits, and of one at most {most.max_tokens:,} do"
        how = f"with --kv {most.plan.kv}" + (" and --drafter none" if question.drafter else "")
        return Advice(kv, False, (f"{fits}, {how}", "ask for a shorter --context or smaller weights"), runs=False)
    drafts, why_drafts = (False, "") if why_not else _choose_drafts(chosen)
    more = chosen.running() if chosen.running() > MAX_SEQS[chosen.plan.device] else 0
    reasons = (why_not, why_kv) if why_not else (why_kv, why_drafts, _largest(chosen))
    return Advice(kv, drafts, reasons, drafter=not why_not, max_seqs=more)


def compare(question: Question, weights: str) -> list[Alternative]:
    """Rank every combination of weights, KV format and drafting: those that hold all streams first, then by speed.
    weights: the name of the asked formats."""
    kinds: dict[str, WeightFormats | None] = {weights: question.formats}
    if question.machine.hardware.device == "cuda":
        kinds |= {name: WeightFormats.parse(name) for name in SMALLER if name != weights}
    found = []
    for name, formats in kinds.items():
        for kv in kv_names():
            for drafter in (question.drafter, None) if question.drafter else (None,):
                other = replace(with_kv(question, kv), formats=formats, drafter=drafter)
                found.append(Alternative(name, kv, drafter is not None, *tried(other)))
    return sorted(found, key=lambda each: (each.forecast is None, not each.holds_all, -each.tok_s))


# ---- the parts


def _in_the_way(asked: Forecast) -> str:
    """Say why the drafter should be left out: fewer streams fit beside it, and together they are slower. Empty if it
    should stay."""
    question = asked.question
    if not question.drafter or asked.holds_all:
        return ""
    beside, alone = (_most(each) for each in (question, without_drafter(question)))
    if not alone or (beside and (beside.running() >= alone.running() or _speed(beside) >= _speed(alone))):
        return ""
    tokens, runs = (beside.max_tokens, beside.running()) if beside else (0, 0)
    fits = f"beside the drafter {tokens:,} tokens of context fit, room for {runs:,} of {_load(question)}"
    return f"{fits}; without it {alone.max_tokens:,} fit, room for {alone.max_streams:,}"


def _most(question: Question) -> Forecast | None:
    """The forecast with the KV format in which most streams run."""
    return max(_each_kv(question), key=Forecast.running, default=None)


def _each_kv(question: Question) -> list[Forecast]:
    return [found for kv in kv_names() if (found := tried(with_kv(question, kv))[0])]


def _load(question: Question) -> str:
    return f"{question.streams:,} {'streams' if question.streams > 1 else 'stream'} of {question.context:,} tokens"


def _choose_kv(question: Question) -> tuple[str, str]:
    """Choose the exact cache if it holds everything and no other format is much faster. Of others, the smallest is
    tried first: TurboQuant is nearer to exact than fp8 (docs/numbers/turboquant.md)."""
    exact, problem = tried(with_kv(question, EXACT))
    smallest_first = [each.name for each in reversed(kv_formats()) if each.name != EXACT]
    others = {kv: found for kv in smallest_first if (found := tried(with_kv(question, kv))[0])}
    load = _load(question)
    if exact is None or exact.max_streams < question.streams:
        largest = max(others, key=lambda kv: others[kv].max_streams, default=None)
        held = exact.max_streams if exact else 0
        if largest and others[largest].max_streams > held:
            return largest, f"exact K/V hold {held:,} of {load}, and {largest} {others[largest].max_streams:,}"
        if exact is None:
            raise UserError(problem)
        return EXACT, f"K/V hold {held:,} of {load}, and no more in other formats: the rest would wait"
    gains = {kv: _speed(found) / _speed(exact) for kv, found in others.items()}
    kv = max(gains, key=lambda name: gains[name], default=None)
    if kv and gains[kv] >= GAIN:
        return kv, f"at {question.context:,} tokens {kv} is {gains[kv]:.2f} times as fast as exact K/V"
    most = f"and {kv} would be {gains[kv]:.2f} times as fast" if kv else "and no other format runs here"
    return EXACT, f"exact K/V hold {load} and have room for {exact.max_streams:,}, {most}"


def _speed(found: Forecast) -> float:
    return found.middle.speed.expected if found.middle else found.plain.expected


def _choose_drafts(found: Forecast) -> tuple[bool, str]:
    if not found.by_class:
        return True, "no drafter is named, so drafts come from text that repeats itself"
    gains = {name: each.speed.expected / found.plain.expected for name, each in found.by_class.items()}
    least, best = min(gains.values()), max(gains, key=lambda name: gains[name])
    need = f"from a chance of {found.least_chance:.2f} of each draft" if found.least_chance else "at no acceptance"
    depth = found.by_class[best].depth
    if least >= PAYS:
        times = f"{gains[best]:.1f}" if len(gains) == 1 else f"{least:.1f} to {gains[best]:.1f}"
        return True, f"drafting pays {need} and makes it {times} times as fast, with up to {depth} drafts"
    if gains[best] >= PAYS:
        losers = ", ".join(name for name, gain in gains.items() if gain < PAYS)
        return True, f"drafting pays {need}: {gains[best]:.2f} times plain on {best}, paused by itself on {losers}"
    return False, f"drafting pays {need}, which no usual text has here"


def _largest(found: Forecast) -> str:
    """Name the largest part of a step and what would reduce it."""
    seconds = found.seconds()
    parts = {name: getattr(seconds, name) / seconds.total for name in ("weights", "kv", "states", "fixed")}
    name = max(parts, key=lambda part: parts[part])
    sizes = found.weights
    floats = sum(size for fmt, size in sizes.items() if fmt in FLOATS)
    smaller = "smaller weights or " if floats > sum(sizes.values()) / 2 else ""
    remedies = {
        "weights": f"{smaller}more accepted drafts would help",
        "kv": "shorter contexts or fewer streams would help",
        "states": "fewer streams at once would help",
        "fixed": "more streams at once would help",
    }
    label = {"weights": "weights are", "kv": "K/V are", "states": "states are", "fixed": "fixed costs are"}[name]
    return f"{label} {parts[name]:.0%} of a plain step: {remedies[name]}"
