"""Turns logits into ids: each row with its own request's parameters, whatever else is in the batch.

Ids are drawn with noise that depends on (seed, position, id) alone (kernels/noise.py), so a seeded request writes the
same text in any batch, after a preemption, and with or without drafts. One operator filters and draws.
Log-probabilities are the model's own, before any of this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkdraft.core import MAX_LOGIT_BIAS, MAX_STOP_IDS, Request, TokenLogprob
from sparkdraft.engine.accept import checked
from sparkdraft.kernels import reference
from sparkdraft.kernels.ops import IN_PROMPT, WIDEST, Draws, EditedSlots, LogitEdits, Ops
from sparkdraft.text.grammar import GrammarState, Mask

LOGPROB_ROWS = 64  # of which the log-probabilities of all ids are in memory at once


class SampleRow(NamedTuple):
    """One row of logits: a request, and the drafts that precede the id sampled in this row."""

    request: Request
    ahead: Sequence[int] = ()
    grammar: GrammarState | None = None  # its state after the committed text, without the drafts

    @property
    def num_output(self) -> int:
        return len(self.request.output_ids) + len(self.ahead)

    @property
    def position(self) -> int:
        return self.request.num_tokens + len(self.ahead)


@dataclass(slots=True)
class Sampled:
    ids: Tensor  # int64 [rows], on the device; reading it is the only wait of the step. accept.NONE: no finite logit
    logits: dict[int, tuple[Tensor, int]]  # row -> (the model's own [vocab], number of alternatives), where requested

    def report(self, first: int, chosen: list[int]) -> list[TokenLogprob] | None:
        """Log-probabilities of consecutive rows of one request, from row 'first' on."""
        if first not in self.logits:
            return None
        rows = torch.stack([self.logits[first + i][0] for i in range(len(chosen))])
        return token_logprobs(rows, chosen, self.logits[first][1])


def draws_of(
    requests: Sequence[Request], positions: Sequence[int], device: torch.device, each: int = 1
) -> Draws | None:
    """How 'each' rows per request are sampled, which sample ids from its position on; None if no request draws."""
    params, count = [request.params for request in requests], len(requests)
    if not any(p.temperature for p in params):
        return None
    floats = array("f", [*(p.temperature for p in params), *(p.min_p for p in params), *(p.top_p for p in params)])
    integers = array("q", [*(p.top_k for p in params), *(request.seed for request in requests)])
    rows = array("i", [slot for slot in range(count) for _ in range(each)])
    rows.extend(position + k for position in positions for k in range(each))
    # Tensors over the arrays' own memory: torch takes several times as long to read lists.
    of_rows, of_floats, of_integers = (
        torch.frombuffer(numbers, dtype=dtype).view(lines, -1).to(device)
        for numbers, dtype, lines in ((rows, torch.int32, 2), (floats, torch.float32, 3), (integers, torch.int64, 2))
    )
    return Draws(of_rows[0], of_rows[1], of_floats, of_integers)


def staged(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it. Torch does not reuse pinned memory while it is copied."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class EditTables:
    """What requests ask of their logits (ops.LogitEdits), on the device: a slot for each request that asks.

    The tables have one size and address for good, because captured steps read and count in them.
    """

    def __init__(self, max_seqs: int, vocab_size: int, eos_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size, self._eos_ids, self._device = vocab_size, eos_ids, device
        self._most = MAX_LOGIT_BIAS + MAX_STOP_IDS + len(eos_ids)
        self._slots: dict[Request, int] = {}
        self._free = list(range(max_seqs))
        self._counted: dict[Request, int] = {}  # output ids that are in the counts, of requests with penalties
        self._tables: EditedSlots | None = None  # made for the first request that asks

    @property
    def num_held(self) -> int:
        return len(self._slots)

    @property
    def tables(self) -> EditedSlots:
        if self._tables is None:
            num_slots = len(self._free) + len(self._slots)

            def made(width: int, dtype: torch.dtype) -> Tensor:
                return torch.zeros((num_slots, width), dtype=dtype, device=self._device)

            biased, bias, until = (made(self._most, dtype) for dtype in (torch.int32, torch.float32, torch.int32))
            counts, penalties = made(self.vocab_size, torch.int32), made(3, torch.float32)
            self._tables = EditedSlots(counts, penalties, biased, bias, until)
        return self._tables

    def of(self, rows: Sequence[SampleRow]) -> LogitEdits | None:
        """The edits of a step's rows; None if no request asks for any."""
        found = self.slots(list(dict.fromkeys(row.request for row in rows)))
        if found is None:
            return None
        ids = [row.ahead[-1] if row.ahead else 0 for row in rows]  # the first token of a request precedes its drafts
        numbers = [[self._slots.get(row.request, -1) for row in rows], [row.position for row in rows], ids]
        numbers.append([len(row.ahead) for row in rows])
        slots, positions, tokens, ahead = torch.tensor(numbers, dtype=torch.int32).to(self._device)
        return LogitEdits(slots, positions, tokens, ahead, self.tables)

    def slots(self, requests: Sequence[Request]) -> list[int] | None:
        """The slot of each request, whose tables are up to date with its output; -1 if it asks for nothing, None if
        none asks."""
        asking = [request for request in requests if self.asks(request)]
        if not asking:
            return None
        for request in asking:
            if request not in self._slots:
                self._write(request)
        self._count(asking)
        return [self._slots.get(request, -1) for request in requests]

    def forget(self, request: Request) -> None:
        self._counted.pop(request, None)
        if request in self._slots:
            self._free.append(self._slots.pop(request))

    def asks(self, request: Request) -> bool:
        params = request.params
        begins = len(request.output_ids) < params.min_tokens and bool(self._excluded(request))
        return bool(params.has_penalties or params.logit_bias or begins)

    def _excluded(self, request: Request) -> set[int]:
        """Ids that may not be written before min_tokens; a grammar's masks see to it themselves."""
        params = request.params
        return {*self._eos_ids, *params.stop_ids} if params.min_tokens and not params.grammar else set()

    def _write(self, request: Request) -> None:
        params, excluded, tables = request.params, self._excluded(request), self.tables
        slot = self._slots[request] = self._free.pop()
        biased, until = sorted({*params.logit_bias, *excluded}), request.num_prompt + params.min_tokens
        device, count = self._device, len(biased)
        tables.biased[slot].fill_(-1)
        if biased:
            tables.biased[slot, :count] = staged(biased, torch.int32, device)
            bias = [params.logit_bias.get(each, 0.0) for each in biased]
            tables.bias[slot, :count] = staged(bias, torch.float32, device)
            last = [until if each in excluded else 0 for each in biased]
            tables.until[slot, :count] = staged(last, torch.int32, device)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        tables.penalties[slot] = staged(penalties, torch.float32, device)
        if params.has_penalties:
            tables.counts[slot].zero_()
            tables.counts[slot].index_fill_(0, staged(request.prompt_ids, torch.int64, device), IN_PROMPT)
            self._counted[request] = 0

    def _count(self, requests: Sequence[Request]) -> None:
        """Count what these requests have written since they were last here."""
        places = []
        for request in requests:
            if request in self._counted:
                start = self._slots[request] * self.vocab_size
                places += [start + each for each in request.output_ids[self._counted[request] :]]
                self._counted[request] = len(request.output_ids)
        if places:
            index = staged(places, torch.int64, self._device)
            self.tables.counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        eos_ids: frozenset[int],
        device: torch.device,
        ops: Ops = reference,
        max_seqs: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.ops = ops
        self.eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self.device = device
        self.edits = EditTables(max_seqs, vocab_size, self.eos_ids, device)

    def __call__(self, logits: Tensor, rows: list[SampleRow]) -> Sampled:
        """Sample an id from each row of 'logits' (float32 [rows, vocab], which is edited in place)."""
        if takes_likeliest(rows):
            return Sampled(checked(logits, pick(self.ops, logits, None)), {})
        raw = self._raw_logits(logits, rows)
        if edits := self.edits.of(rows):
            self.ops.edit_logits(logits, edits)
        if any(r.grammar for r in rows):
            self._constrain(logits, rows)
        draws = draws_of([r.request for r in rows], [r.position for r in rows], logits.device)
        return Sampled(checked(logits, pick(self.ops, logits, draws)), raw)

    def forget(self, request: Request) -> None:
        self.edits.forget(request)

    # ---- grammars

    def _constrain(self, logits: Tensor, rows: list[SampleRow]) -> None:
        """Mask each row by what the grammar allows after its drafts. Rows behind a draft that breaks the grammar stay
        as they are.

        Such a draft is masked in its own row, so it is never accepted, and the rows behind it are never used.
        """
        masks: list[Mask] = []
        which = [-1] * len(rows)
        for first, row in enumerate(rows):
            if row.grammar and not row.ahead:  # the first row of its request; the rows of a request are consecutive
                last = next((i for i in range(first + 1, len(rows)) if not rows[i].ahead), len(rows)) - 1
                for index, mask in enumerate(row.grammar.masks(rows[last].ahead), first):
                    which[index] = len(masks)
                    masks.append(self.keep_open(mask, rows[index]))
        bits = torch.from_numpy(np.stack(masks)).to(logits.device)
        self.ops.forbid_bits(logits, bits, torch.tensor(which, dtype=torch.int32, device=logits.device))

    def keep_open(self, mask: Mask, row: SampleRow) -> Mask:
        """Remove the end of the text from a mask where the text must go on (min_tokens, ignore_eos), unless nothing
        else is allowed."""
        params = row.request.params
        short = row.num_output < params.min_tokens
        if not short and not params.ignore_eos:
            return mask
        open_mask = mask.copy()
        for token in {*self.eos_ids, *(params.stop_ids if short else ())}:
            open_mask[token // 8] &= 255 ^ (1 << token % 8)
        return open_mask if open_mask.any() else mask

    def _raw_logits(self, logits: Tensor, rows: list[SampleRow]) -> dict[int, tuple[Tensor, int]]:
        """Copies rows before they are edited."""
        wanted = {i: r.request.params.logprobs for i, r in enumerate(rows)}
        return {i: (logits[i].clone(), top) for i, top in wanted.items() if top is not None}


def pick(ops: Ops, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    """int64 [rows]: the id that each row of 'logits' [rows, columns] takes, which is its likeliest or the one it draws.

    Samples and drafts are picked by this one function, on the host and in overlapped steps. draws: None if all rows are
    greedy. ids: int64 [columns], the id of each column; None if a column's number is its id.
    """
    return ids_of(ops.sample(logits, draws, ids), ids)


def ids_of(columns: Tensor, ids: Tensor | None) -> Tensor:
    """The ids of columns; with ids None a column's number is its id. Uses numpy on a CPU, at a fraction of torch's
    time."""
    if ids is None:
        return columns
    return torch.from_numpy(ids.numpy()[columns.numpy()]) if ids.device.type == "cpu" else ids[columns]


def takes_likeliest(rows: Sequence[SampleRow]) -> bool:
    """Return whether every row takes its likeliest id and needs nothing else, as in most steps."""
    known: Request | None = None
    for row in rows:
        if row.request is not known:  # the rows of a request are consecutive
            known, params = row.request, row.request.params
            if params.temperature or params.logprobs is not None or params.logit_bias:
                return False
            if row.grammar or params.has_penalties or len(known.output_ids) < params.min_tokens:
                return False
    return True


def token_logprobs(logits: Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability reports of chosen ids from rows of raw logits [rows, vocab], in one transfer."""
    return read_logprobs(top_logprobs(logits, torch.tensor(chosen, device=logits.device), top), chosen, top)


def top_logprobs(logits: Tensor, chosen: Tensor, top: int) -> Tensor:  # float32 [rows, vocab], integers [rows]
    """float32 [rows, 1 + 2 * top]: log-probabilities of the chosen ids, then those of the 'top' likeliest, then their
    ids, which a float32 holds exactly up to 16,777,216. A row whose chosen id is NONE has that of id 0.

    It waits for nothing, so a CUDA graph can hold it. log_softmax is one launch where logsumexp, which has a temporary
    of the same size, is nine.
    """
    tables = []
    for rows, ids in zip(logits.split(LOGPROB_ROWS), chosen.split(LOGPROB_ROWS), strict=True):
        logprobs = rows.log_softmax(-1)
        best = logprobs.topk(top)
        own = logprobs.gather(1, ids.long().clamp(min=0).unsqueeze(1))
        tables.append(torch.cat([own, best.values, best.indices.float()], 1))
    return torch.cat(tables)


def read_logprobs(table: Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """The reports in a table of `top_logprobs`, which may hold more alternatives than the 'top' that are wanted."""
    held = table.shape[1] // 2
    return [
        TokenLogprob(token, row[0], [(int(row[1 + held + i]), row[1 + i]) for i in range(top)])
        for token, row in zip(chosen, table.tolist(), strict=True)
    ]


class Sure(NamedTuple):
    """Picked drafts and how sure each is: the gap between its score and the others'."""

    ids: Tensor  # int64 [rows]
    gaps: Tensor  # float32 [rows]


def pick_sure(ops: Ops, logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Sure:
    """Pick as `pick` does, and find the gaps in the same logits, without another pass over the head."""
    columns, gaps = ops.sample_sure(logits, draws, ids, WIDEST)
    return Sure(ids_of(columns, ids), gaps)
