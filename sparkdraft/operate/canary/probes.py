"""The probes of a backend: each asks something whose answer is known, and raises Failed if another one comes.

A probe trusts as little as it can: drafted text is held against plain text, a cached prefix against one that is
computed anew, and what the sampler chose against scores that do not come from the sampler.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams
from sparkdraft.operate.canary.asker import NEAR, Asker, nearness
from sparkdraft.operate.canary.findings import Failed, Skipped

# Text that repeats itself with changes: some drafts of it are right and some are wrong.
COUNTED = "1. One apple costs 3 euros.\n2. Two apples cost 6 euros.\n3. Three apples cost 9 euros.\n4."
WORDS = (
    "harbour lantern copper violin meadow saddle orchid thunder pepper marble anchor velvet compass basket willow "
    "candle falcon ribbon tunnel walnut glacier button spider trumpet cotton desert feather hammer island jacket"
)
LIST = f"The words of the list are: {WORDS}. Once more, the words of the list are: harbour lantern copper"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ALTERNATIVES = 5


def drafted_is_plain(asker: Asker) -> str:
    """Text written with as many drafts as possible is the text written without any."""
    depth = int(asker.info.plan_facts.get("max_draft") or 0)
    if not depth:
        raise Skipped("nothing drafts")
    prompt, params = asker.encode(COUNTED), SamplingParams(max_tokens=32, ignore_eos=True)
    plain = asker.ask(prompt, replace(params, num_draft=0, logprobs=ALTERNATIVES))
    drafted = asker.ask(prompt, replace(params, num_draft=depth))
    tried, taken = (drafted.drafting.get(f"num_{name}_tokens", 0) for name in ("draft", "accepted_draft"))
    if not tried:
        raise Skipped("no step drafted")
    return f"{asker.same(plain, drafted, ('plain text', 'drafted text'))}; {taken} of {tried} drafts were accepted"


def sampler_is_honest(asker: Asker) -> str:
    """The sampler chooses what the scores say: greedy text is the likeliest by scores that are computed without the
    sampler, and the log-probabilities that it reports are those."""
    prompt = asker.encode(COUNTED)
    said = asker.ask(prompt, SamplingParams(max_tokens=16, num_draft=0, logprobs=ALTERNATIVES, ignore_eos=True))
    scored = asker.ask([*prompt, *said.ids], SamplingParams(max_tokens=1, num_draft=0, prompt_logprobs=ALTERNATIVES))
    rows = scored.prompt_logprobs[len(prompt) :]
    if len(rows) != len(said.ids) or len(said.logprobs) != len(said.ids):
        raise Failed(f"{len(said.ids)} tokens were written, and {len(said.logprobs)} of them have log-probabilities")
    for place, (token, reported, row) in enumerate(zip(said.ids, said.logprobs, rows, strict=True)):
        assert row is not None, "only a prompt's first token has no score"
        if (gap := nearness(row, token)) > NEAR:
            raise Failed(f"token {place} of a greedy text is {gap:.1f} nats less likely than the likeliest one")
        if reported.id != token or not abs(reported.logprob - row.logprob) <= NEAR:
            raise Failed(
                f"token {place} is reported with the log-probability {reported.logprob:.2f} and has {row.logprob:.2f}"
            )
    first = SamplingParams(max_tokens=16, temperature=1.0, top_k=1, seed=7, num_draft=0, ignore_eos=True)
    found = asker.same(said, asker.ask(prompt, first), ("greedy text", "text with top_k 1"))
    return f"{len(said.ids)} greedy tokens are the likeliest, as scored without the sampler; with top_k 1 {found}"


def hit_is_cold(asker: Asker) -> str:
    """A prompt whose beginning comes from the prefix cache is continued as one that is computed anew. The model copies
    a list, so each block of the prompt is read."""
    if not asker.info.plan_facts.get("prefix_cache"):
        raise Skipped("the prefix cache is off")
    prompt = asker.encode(LIST)
    params = SamplingParams(max_tokens=min(len(prompt), 40), num_draft=0, logprobs=ALTERNATIVES, ignore_eos=True)
    cold = asker.ask(prompt, replace(params, prompt_logprobs=0))  # the cache has no prompt log-probabilities
    hit = asker.ask(prompt, params)
    if cold.num_cached:
        raise Skipped("the prompt was not computed anew")
    if not hit.num_cached:
        raise Skipped("the prompt was not found again in the prefix cache")
    found = asker.same(cold, hit, ("the computed prompt", "the cached prompt"))
    pairs = [(a.logprob, b.logprob) for a, b in zip(cold.logprobs, hit.logprobs, strict=False) if a.id == b.id]
    if wrong := next((pair for pair in pairs if not abs(pair[0] - pair[1]) <= NEAR), None):
        raise Failed(f"a token has the log-probability {wrong[0]:.2f} computed, and {wrong[1]:.2f} from the cache")
    return f"{found}, {hit.num_cached} of {len(prompt)} prompt tokens cached"


def grammar_holds(asker: Asker) -> str:
    """An answer under a schema follows the schema, also where drafts are made."""
    params = SamplingParams(max_tokens=64, grammar=GrammarSpec("json_schema", json.dumps(SCHEMA)))
    answer = asker.ask(asker.encode("The person as JSON:\n"), params)
    if answer.finish is not FinishReason.STOP:
        raise Failed(f"an answer under a schema did not end: {answer.text!r}")
    try:
        value = json.loads(answer.text)
    except ValueError:
        raise Failed(f"an answer under a schema is not JSON: {answer.text!r}") from None
    if not _fits(value):
        raise Failed(f"an answer does not follow its schema: {answer.text!r}")
    return f"the answer follows its schema: {json.dumps(value)}"


def codes_are_within_bounds(asker: Asker) -> str:
    errors = asker.backend.coding_errors()
    if not errors:
        raise Skipped("keys and values are not coded")
    worst = errors[0]
    said = f"{worst.what} are off by {worst.error:.1%}, and {worst.limit:.1%} is the limit"
    if not worst.error <= worst.limit:
        wrong = sum(not each.error <= each.limit for each in errors)
        raise Failed(f"{said}; {wrong} of {len(errors)} are beyond theirs")
    return f"at most, {said}"


def _fits(value: Any) -> bool:
    """Whether a value follows SCHEMA."""
    if not isinstance(value, dict) or set(value) != {"name", "age"}:
        return False
    name, age = value["name"], value["age"]
    return isinstance(name, str) and len(name) <= 12 and type(age) is int and age <= 99
