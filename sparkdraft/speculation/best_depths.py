"""The depths at which a batch writes the most tokens a second, given what each request's drafts bring and cost.

Arithmetic only: speculation/depth.py learns the numbers and decides when to ask. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparkdraft.speculation.step_costs import Price

INHERIT = 0.9  # how much of a position's departure from the prior the next position expects for itself
MARGIN = 1.03  # what a request must be promised before it begins to draft; it stops as soon as drafts would lose


class Offer(NamedTuple):
    """What one request's steps are expected to bring and to cost, for each depth that may be chosen."""

    tokens: Sequence[float]
    kept: Sequence[float]  # drafts that are verified
    rows: Sequence[float]  # seconds of its own rows, beside as many of others as are supposed


def best_depths(
    offers: Sequence[Offer], rest: Sequence[bool], price: Price, choice: Sequence[int], others: int
) -> tuple[list[int], float]:
    """Depths that maximise tokens a second over the batch, in which 'others' write one id each beside these; and that
    rate.

    At the best rate r (tokens a second) drafts are worth their rows' time t where they bring more than r t tokens, for
    each request by itself; so begin with r of the best common depth, let each choose, compute the r that gives, repeat.
    """
    num, begun = len(offers), price.plain + price.fixed
    plain_rate = (num + others) / price.plain
    least = plain_rate * (MARGIN if all(rest) else 1.0)
    if num + others == 1:
        tokens, _, rows = offers[0]
        rate, best = max((tokens[i] / (begun + rows[i]), i) for i in range(1, len(choice)))
        return ([choice[best]], rate) if rate > least else ([0], plain_rate)

    deeper = [price.deeper[depth] for depth in choice]
    tokens = [sum(each) for each in zip(*(own.tokens for own in offers), strict=True)]
    kept = [sum(each) for each in zip(*(own.kept for own in offers), strict=True)]
    common = [(others + tokens[i]) / price.step(num * deeper[i], kept[i]) for i in range(1, len(choice))]
    rate = max(plain_rate, *common)
    for _ in range(4):
        chosen = [_best_choice(own, rate, rests) for own, rests in zip(offers, rest, strict=True)]
        reached = plain_rate
        if any(chosen):
            picked = [(own.tokens[i], own.kept[i], deeper[i]) for own, i in zip(offers, chosen, strict=True)]
            brought, verified, drafting = (sum(each) for each in zip(*picked, strict=True))
            reached = (others + brought) / price.step(drafting, verified)
        if reached <= rate * 1.001:
            break
        rate = reached
    return ([choice[i] for i in chosen], reached) if reached > least else ([0] * num, plain_rate)


def _best_choice(offer: Offer, rate: float, rests: bool) -> int:
    plain, *net = [tokens - rate * seconds for tokens, seconds in zip(offer.tokens, offer.rows, strict=True)]
    best = max(net)
    return 1 + net.index(best) if best > plain * (MARGIN if rests else 1.0) else 0


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Tokens a step commits on average, by depth from 0, given the acceptance of each position once it is reached."""
    total, reached, tokens = 1.0, 1.0, [1.0]
    for chance in chances:
        reached *= chance
        total += reached
        tokens.append(total)
    return tokens


def conditional_acceptance(
    taken: Sequence[float], tried: Sequence[float], prior: Sequence[float], trust: float
) -> list[float]:
    """By position: the counts, leaning on the prior moved by as much as the position before departs from its own."""
    chances, departure = [], 0.0
    for hits, count, usual in zip(taken, tried, prior, strict=True):
        base = usual + INHERIT * departure
        base = 0.0 if base < 0.0 else 1.0 if base > 1.0 else base
        chance = (hits + trust * base) / (count + trust)
        departure = chance - usual
        chances.append(chance)
    return chances
