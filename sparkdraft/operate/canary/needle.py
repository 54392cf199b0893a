"""Is a word that was planted far back found again? Asked of a model's scores, because small models answer badly.

A sentence with one of two words is hidden in a long text, whose end is the beginning of that sentence. Each text is run
with each word, and what counts is how much likelier a word becomes by being planted. A short text comes first: a model
that does not find the word there (one with random weights, say) cannot show that long contexts are broken.
"""

from __future__ import annotations

import random
from typing import Any

from sparkdraft.core import MAX_LOGPROBS, SamplingParams
from sparkdraft.operate.canary.asker import Asker
from sparkdraft.operate.canary.findings import Failed, Skipped

SENTENCE = "The password of the lighthouse is"
PASSWORDS = (" banana", " window")
SHORT, LONG = 96, 8192  # tokens
BUDGET = 1.2  # seconds for both runs of the long text
FOUND = 2.0  # nats by which planting must favour a word
UNSEEN = -20.0  # the log-probability of a word that is not among the likeliest
PEOPLE = ("Ada", "Bela", "Carl", "Dora", "Emil", "Frida", "Georg", "Hanna", "Ivan", "Jana")
THINGS = ("fences", "boats", "letters", "bridges", "gardens", "clocks", "kites", "maps", "shoes", "stoves")
PLACES = ("by the mill", "near the station", "behind the church", "on the hill", "at the market", "in the valley")


def needle_is_found(asker: Asker) -> str:
    if asker.room < SHORT:
        raise Skipped(f"the context has {asker.info.max_model_len} tokens, which is too short to hide anything")
    favour, speed = planted(asker, SHORT)
    if favour < FOUND:
        raise Skipped(f"the model does not find a word again among {SHORT} tokens, so longer texts would tell nothing")
    length = min(asker.room, LONG, max(4 * SHORT, int(speed * BUDGET / len(PASSWORDS))))
    favour, _ = planted(asker, length)
    said = f"a word planted among {length} tokens became {favour:.1f} nats likelier"
    if favour < FOUND:
        raise Failed(f"{said}, and {FOUND:.0f} is the least; among {SHORT} tokens the model finds it")
    return said


def planted(asker: Asker, length: int) -> tuple[float, float]:
    """The nats that planting favours a word by, the mean of both words, in a text of about this many tokens; and the
    tokens per second that were read, without those of the prefix cache."""
    words = [asker.encode(f"x{word}")[-1] for word in PASSWORDS]
    if words[0] == words[1]:
        raise Skipped("the tokenizer does not tell the planted words apart")
    before, after = _filler(asker, length // 2, 1), _filler(asker, length - length // 2 - 24, 2)
    scores, seconds, read = [], 0.0, 0
    for word in PASSWORDS:
        text = f"{before} {SENTENCE}{word}. {after} {SENTENCE}"
        ids = asker.encode(text)
        answer = asker.ask(ids, SamplingParams(max_tokens=1, num_draft=0, logprobs=MAX_LOGPROBS))
        known: dict[Any, float] = dict(answer.logprobs[0].top)
        scores.append([max(known.get(token, UNSEEN), UNSEEN) for token in words])
        seconds, read = seconds + answer.seconds, read + len(ids) - answer.num_cached
    return (scores[0][0] - scores[0][1] + scores[1][1] - scores[1][0]) / 2, read / seconds


def _filler(asker: Asker, length: int, seed: int) -> str:
    """Plain sentences of about this many tokens, always the same."""
    numbers, text, sentences = random.Random(seed), "", []
    while len(asker.encode(text)) < length:
        for _ in range(max(1, (length - len(asker.encode(text))) // 16)):
            who, what, where = (numbers.choice(choices) for choices in (PEOPLE, THINGS, PLACES))
            sentences.append(f"{who} repairs {numbers.randrange(2, 99)} {what} {where}.")
        text = " ".join(sentences)
    return text
