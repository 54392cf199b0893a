"""Drafts from a request's own text, found on the device; drafters/ngram.py finds them on the host.

A row of ids holds a request's prompt, then its output. The text's last ids are looked for in the text itself, and what
followed them there is drafted:

    ids      .... [e-L+1 .. e] e+1 ......... n-1          the last L ids, n-L .. n-1, occurred before and ended at e
    drafts                     e+1 ......... n-1 e+1 ..   copied on, and round again: a loop is drafted to any length

The longest run wins, then the newest. Nothing is remembered between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdraft.kernels.ops import MOST_MATCH


def match_text(ids: Tensor, length: Tensor, min_match: int, drafts: Tensor) -> Tensor:
    matched = torch.zeros_like(length)
    for seq, count in enumerate(length.tolist()):
        text = ids[seq, :count]
        end, run = _longest_run(text)
        if run >= min_match:
            period = len(text) - (end + 1)
            drafts[seq] = text[end + 1 + torch.arange(drafts.shape[1], device=ids.device) % period]
            matched[seq] = run
    return matched


def _longest_run(text: Tensor) -> tuple[int, int]:
    """Where the longest run that the text also ends with ended before, the newest of equals, and its ids; (-1, 0):
    nowhere."""
    last, best = len(text) - 1, (-1, 0)
    ends = torch.arange(len(text), device=text.device)[:-1]
    for back in range(min(last, MOST_MATCH)):
        ends = ends[ends >= back]
        ends = ends[text[ends - back] == text[last - back]]
        if not len(ends):
            break
        best = int(ends[-1]), back + 1
    return best


def append_text(ids: Tensor, length: Tensor, samples: Tensor, count: Tensor) -> None:
    columns = torch.arange(samples.shape[1], device=ids.device)
    places = length.unsqueeze(1) + columns
    wanted = (length > 0).unsqueeze(1) & (columns < count.unsqueeze(1)) & (places < ids.shape[1])
    seq, column = wanted.nonzero(as_tuple=True)
    ids[seq, places[seq, column]] = samples[seq, column].to(ids.dtype)
