"""How well a model predicts a text it cannot have seen: the check that cheaper weights are still the same model.

heldout.txt was written for this project. The engine itself scores the text in windows, as prompt rows, so the figure
covers the same path that serves requests.
"""

from __future__ import annotations

import math
from pathlib import Path

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.llm import LLM

HELDOUT = Path(__file__).with_name("heldout.txt")
WINDOW = 512


def perplexity(llm: LLM, text: str) -> tuple[float, int]:
    """(perplexity, tokens scored). Raises UserError for a text without a token that another one precedes."""
    ids = llm.tokenizer.encode(text, add_special=False)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens, and a perplexity needs two or more: give a longer one")
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    results = llm.generate([w for w in windows if len(w) > 1], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = [t.logprob for r in results for t in r.completions[0].prompt_logprobs or [] if t is not None]
    return math.exp(-sum(scores) / len(scores)), len(scores)
