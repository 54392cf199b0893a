"""Writes the continuations of a corpus in bulk, on a GPU with thousands of seats, on a CPU with the engine.

On a GPU a seat permanently owns consecutive cache blocks and a row of ids, so every decode step makes the same
launches: one forward with one token per seat, one sample, one append, captured as a CUDA graph. Every CHECK steps the
host takes the texts that have ended and seats new prompts; it returns texts while the device runs the next steps. A
text that continues (the next turn of a conversation) keeps its seat and its K/V. data.py decides what is asked.

    written[seat]   . . . prompt . . . | response . . . |                          position of an id = its column
                    0         num_prompt          length  <- the id at length - 1 is the next step's row

The engine would be slower on a GPU: its scheduler, blocks and outputs are Python for every request in every step, while
a step here costs the host the same for 4,096 texts as for one. On a CPU its quantised weights and native kernels are
many times faster than floats, so there every text and every turn is a request, and the prefix cache holds the turns
before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdraft.cache.formats.dense import DenseKV
from sparkdraft.core import FinishReason, SamplingParams, UserError
from sparkdraft.kernels.ops import AttentionView
from sparkdraft.llm import LLM
from sparkdraft.models.common.blocks import Step
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.sizes import kv_bytes_per_token
from sparkdraft.models.registry import read_config
from sparkdraft.text.repetition import LoopRule, ends_in_loop, find_loops
from sparkdraft.train.corpus import Finish
from sparkdraft.train.memory import target_step
from sparkdraft.train.process import Stop
from sparkdraft.train.target import ChatModel, Target
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.loader import Progress

CHECK = 16  # steps between two checks by the host
BLOCK = 64  # positions per cache block
LOOP = LoopRule(max_period=64, min_repeated=64)
RUNNING = -1  # state of a seat whose text goes on; the other states are those of Finish
MOST_SEATS, CPU_SEATS = 4096, 8
GPU_ROWS, CPU_ROWS = 16384, 512  # prompt tokens per forward
NOISE_BYTES = 512 << 20  # of float32 scores in memory at once
MEMORY_SHARE = 0.9  # of the free memory
LEAST_DRAW = 1e-10  # an exponential draw of 0 would give an infinite score, and 0 * infinity is NaN
SEATS = 8  # requests at once: the native kernels gain little from more tokens
RECENT = LOOP.max_period + LOOP.min_repeated
Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    kind: str
    temperature: float  # 0 is greedy
    max_new: int
    tag: Any = None  # the caller's own
    held: int = 0  # of a text that continues: leading ids whose K/V are still valid


@dataclass(frozen=True, slots=True)
class Written:
    prompt: Prompt
    ids: Array  # the response alone, including the id that ended it
    finish: Finish


Follow = Callable[[Written], Prompt | None]  # returns how a text continues; None: it has ended


class Writer(Protocol):
    """Writes responses; BulkGenerator does on a GPU, EngineWriter on a CPU."""

    num_generated: int  # ids sampled so far, including those that were cut off as loops

    def run(self, prompts: Iterable[Prompt], stopped: Stop = ..., follow: Follow | None = None) -> Iterator[Written]:
        """Yield a response to each prompt in the order in which they end; once stopped, only those that have ended.

        follow: may let a text that ended continue; then only its last part is yielded.
        """


class BulkGenerator:
    def __init__(
        self,
        target: Target,
        max_len: int,  # longest prompt and response together
        seats: int = 0,  # 0: as many as fit, at most 'most_seats'
        most_seats: int = MOST_SEATS,
        stop_ids: Iterable[int] | None = None,  # None: the model's own end-of-text ids
        seed: int = 0,
    ) -> None:
        self.target, self.decoder = target, target.decoder
        if not 2 <= max_len <= target.context:
            raise UserError(f"texts of {max_len} tokens were asked for; the target was loaded for {target.context}")
        self.max_len = -(-max_len // BLOCK) * BLOCK
        on_gpu = target.device.type == "cuda"
        self.max_step_tokens = max(GPU_ROWS if on_gpu else CPU_ROWS, self.max_len)
        self.seats = seats or min(self._seats_that_fit() if on_gpu else CPU_SEATS, most_seats)
        self.num_generated = 0  # ids sampled so far, including those that were cut off as loops
        self._limit_len = max_len
        self._chunk = sampled_rows(target.config)
        self._occupant: list[Prompt | None] = [None] * self.seats
        self._free = list(range(self.seats))
        self._waiting: deque[Prompt] = deque()
        self._going_on: deque[tuple[int, Prompt]] = deque()  # with their seats
        self._graphs: dict[bool, Any] = {}  # keyed by whether any seat has a temperature
        # CUDA graphs support only the default generator
        self._generator = None if on_gpu else torch.Generator().manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        self._allocate(sorted(target.tokenizer.eos_ids if stop_ids is None else stop_ids))

    def run(
        self, prompts: Iterable[Prompt], stopped: Stop = lambda: False, follow: Follow | None = None
    ) -> Iterator[Written]:
        source, ended = iter(prompts), list[Written]()
        self._clear()
        self._pull(source)
        while not stopped() and self._refill():
            self._advance()
            yield from map(_cut, ended)  # the device works meanwhile
            self._pull(source)
            ended = []
            for seat, written in self._harvest():
                if follow and (prompt := follow(_cut(written))):
                    rows = len(written.prompt.ids) + len(written.ids) - 1  # the last id has not been run yet
                    self._going_on.append((seat, replace(prompt, held=min(prompt.held, rows))))
                else:
                    self._free.append(seat)
                    ended.append(written)
        yield from map(_cut, ended)

    # ---- the device

    @torch.inference_mode()
    def _allocate(self, stop_ids: Sequence[int]) -> None:
        config, device, seats = self.target.config, self.target.device, self.seats
        blocks = self.max_len // BLOCK
        self._kv = DenseKV(config.attention, seats * blocks, BLOCK, self.target.dtype, device, self.target.ops)
        integers = partial(torch.zeros, dtype=torch.int32, device=device)
        self._tables = torch.arange(seats * blocks, dtype=torch.int32, device=device).view(seats, blocks)
        self._starts = torch.arange(seats + 1, dtype=torch.int32, device=device)
        self._seat_start = self._starts[:-1] * self.max_len  # slot of its position 0
        self._status = integers((2, seats))  # lengths and states: the host reads both in one copy
        self._length, self._state = self._status.unbind(0)
        self._last, self._limit, self._num_prompt = integers(seats), integers(seats), integers(seats)
        self._temperature = torch.zeros(seats, device=device)
        self._written = integers((seats, self.max_len + 1))  # one more column, for seats that write nothing
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.int32, device=device)
        self._host = torch.zeros((2, seats), dtype=torch.int32, pin_memory=device.type == "cuda")

    def _step(self, noisy: bool) -> Tensor:
        """Append one id to every running seat. Only fixed tensors are read and written, so it can be captured."""
        done = self._state != RUNNING
        position = (self._length - 1).clamp_min(0)
        slots = torch.where(done, -1, self._seat_start + position)
        context = torch.where(done, 0, self._length)
        view = AttentionView(self._starts, context, self._tables, 1, self.max_len)
        residual = self.decoder.forward(Step(self._last, position, slots, view, self._kv.layers))
        ids = self._sample(residual, self._temperature, noisy)
        column = torch.where(done, self.max_len, self._length).long()
        self._written.scatter_(1, column[:, None], ids[:, None])
        self._last.copy_(torch.where(done, self._last, ids))
        self._length.add_(~done)
        self._state.copy_(torch.where(done, self._state, self._outcome(ids, self._length, self._limit)))
        return self._state

    def _sample(self, residual: Tensor, temperature: Tensor, noisy: bool) -> Tensor:  # [rows, hidden] -> int32 [rows]
        """Return argmax(logits + T * gumbel), which draws from softmax(logits / T) and is greedy where T is 0."""
        picked = []
        for rows, warmth in zip(residual.split(self._chunk), temperature.split(self._chunk), strict=True):
            scores = self.decoder.scores(rows)
            if noisy:  # the negated logarithm of an exponential draw is a Gumbel draw
                noise = torch.empty(scores.shape, device=scores.device).exponential_(generator=self._generator)
                scores = noise.clamp_min_(LEAST_DRAW).log_().mul_(-warmth[:, None]).add_(scores)
            picked.append(scores.argmax(-1))
        return torch.cat(picked).int()

    def _outcome(self, ids: Tensor, length: Tensor, limit: Tensor) -> Tensor:  # int32 [rows]
        """Return the state of seats after an id was appended."""
        ends = (ids[:, None] == self._stop_ids).any(1)
        return torch.where(ends, int(Finish.END), torch.where(length >= limit, int(Finish.LENGTH), RUNNING)).int()

    @torch.inference_mode()
    def _advance(self) -> None:
        """Queue CHECK steps, a search for loops, and the copy of the status to the host."""
        noisy = any(prompt is not None and prompt.temperature > 0 for prompt in self._occupant)
        if self.target.device.type == "cpu":
            for _ in range(CHECK):
                if (self._step(noisy) != RUNNING).all():
                    break
        else:
            if noisy not in self._graphs:
                self._step(noisy)  # a normal step, run once before it is captured
                beside = next(iter(self._graphs.values()), None)
                assert self.target.ops.Graph
                self._graphs[noisy] = self.target.ops.Graph(partial(self._step, noisy), beside)
            for _ in range(CHECK):
                self._graphs[noisy].replay()
        self._find_loops()
        self._host.copy_(self._status, non_blocking=True)

    def _find_loops(self) -> None:
        """Mark seats that repeat themselves as done, unless their text has ended by itself."""
        span = torch.arange(-LOOP.max_period - LOOP.min_repeated, 0, device=self._length.device)
        recent = self._written.gather(1, (self._length[:, None] + span).clamp_min(0))
        loops = ends_in_loop(recent, self._length - self._num_prompt, LOOP)
        loops &= self._state != int(Finish.END)
        self._state.masked_fill_(loops, int(Finish.LOOP))

    # ---- the host

    def _clear(self) -> None:
        self._occupant = [None] * self.seats
        self._free = list(range(self.seats))
        self._waiting.clear()
        self._going_on.clear()
        with torch.inference_mode():
            self._state.fill_(int(Finish.END))

    def _pull(self, source: Iterator[Prompt]) -> None:
        """Queue a prompt for every seat that may become free."""
        self._waiting.extend(islice(source, self.seats - len(self._waiting)))

    def _refill(self) -> bool:
        """Seat waiting prompts while seats are free. Returns whether any seat is taken."""
        while self._going_on or (self._waiting and self._free):
            batch, rows = list[tuple[int, Prompt]](), 0
            while self._going_on or (self._waiting and self._free):
                prompt = self._going_on[0][1] if self._going_on else self._waiting[0]
                rows += len(prompt.ids) - prompt.held
                if rows > self.max_step_tokens and batch:
                    break
                assert 0 < len(prompt.ids) < self._limit_len and prompt.max_new > 0, (len(prompt.ids), prompt.max_new)
                taken = self._going_on.popleft() if self._going_on else (self._free.pop(0), self._waiting.popleft())
                batch.append(taken)
            for seat, prompt in batch:
                self._occupant[seat] = prompt
            self._prefill(np.array([seat for seat, _ in batch], np.int32), [prompt for _, prompt in batch])
        return len(self._free) < self.seats

    @torch.inference_mode()
    def _prefill(self, seats: Array, batch: Sequence[Prompt]) -> None:
        """Run the prompts of these seats in one ragged forward, and sample the first id of each response."""
        ids = np.concatenate([np.asarray(prompt.ids[prompt.held :], np.int32) for prompt in batch])
        held = np.array([prompt.held for prompt in batch], np.int32)  # tokens that are in the cache already
        whole = np.array([len(prompt.ids) for prompt in batch], np.int32)
        lengths = whole - held
        limits = np.minimum(whole + np.array([p.max_new for p in batch], np.int32), self._limit_len)
        warmth = np.array([prompt.temperature for prompt in batch], np.float32)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(len(ids)) - np.repeat(starts[:-1] - held, lengths)
        slots = np.repeat(seats.astype(np.int64) * self.max_len, lengths) + positions
        arrays = [ids, positions, slots, starts, whole, limits, starts[1:] - 1, seats, warmth.view(np.int32)]
        packed = torch.from_numpy(np.concatenate([a.astype(np.int32, copy=False) for a in arrays]))
        parts = packed.to(self.target.device).split([len(a) for a in arrays])  # one copy to the device
        t_ids, t_positions, t_slots, t_starts, t_whole, t_limits, last, seat, t_warmth = parts
        seat, temperature = seat.long(), t_warmth.view(torch.float32)
        view = AttentionView(t_starts, t_whole, self._tables[seat], int(lengths.max()), int(whole.max()))
        residual = self.decoder.forward(Step(t_ids, t_positions, t_slots, view, self._kv.layers))
        picked = self._sample(residual[last.long()], temperature, bool(warmth.any()))
        self._written[seat, t_whole.long()] = picked
        self._last[seat], self._num_prompt[seat], self._limit[seat] = picked, t_whole, t_limits
        self._temperature[seat], self._length[seat] = temperature, t_whole + 1
        self._state[seat] = self._outcome(picked, t_whole + 1, t_limits)

    @torch.inference_mode()
    def _harvest(self) -> list[tuple[int, Written]]:
        """Wait for the queued steps, and free the seats of texts that have ended or loop."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        lengths, states = self._host.numpy()
        seats = [int(seat) for seat in np.flatnonzero(states != RUNNING) if self._occupant[seat] is not None]
        if not seats:
            return []
        rows = self._written[torch.tensor(seats, device=self._written.device)].cpu().numpy()  # [ended, max_len + 1]
        ended = []
        for row, seat in zip(rows, seats, strict=True):
            prompt, self._occupant[seat] = self._occupant[seat], None
            assert prompt is not None
            written = Written(prompt, row[len(prompt.ids) : lengths[seat]], Finish(int(states[seat])))
            self.num_generated += len(written.ids)
            ended.append((seat, written))
        return ended

    def _seats_that_fit(self) -> int:
        torch.cuda.empty_cache()  # so that what an earlier generator held counts as free
        free, _ = torch.cuda.mem_get_info()
        seats = seats_that_fit(self.target.config, self.max_len, self.max_step_tokens, free, self.target.dtype.itemsize)
        if not seats:
            raise UserError(
                f"texts of {self.max_len} tokens do not fit into {free / 2**30:.1f} GiB of free GPU memory; "
                "ask for shorter ones, or free some"
            )
        return seats


def seats_that_fit(config: ModelConfig, max_len: int, max_step_tokens: int, bytes_free: int, itemsize: int) -> int:
    """Count the seats of 'max_len' tokens that fit into most of the free memory beside a step's activations."""
    scratch = target_step(config, max_step_tokens, sampled_rows(config), itemsize)
    each = max_len * (kv_bytes_per_token(config.attention, itemsize) + 4)
    return max(min((int(bytes_free * MEMORY_SHARE) - scratch) // each, MOST_SEATS), 0)


def sampled_rows(config: ModelConfig) -> int:
    """Count the tokens that are sampled at once; their scores are float32 and as wide as the vocabulary."""
    return min(max(NOISE_BYTES // (4 * config.vocab_size), 1), MOST_SEATS)


def cut_loop(ids: Array) -> Array:
    """Cut a response that ends in a loop after the loop's second period; return any other response unchanged."""
    for start, period in find_loops(ids, LOOP):
        return ids[: start + period]
    return ids


def _cut(written: Written) -> Written:
    """Return the text without its loop, with ids of its own instead of a view of the copied buffer."""
    ids = cut_loop(written.ids) if written.finish is Finish.LOOP else written.ids
    return replace(written, ids=ids.copy())


# ---- on a CPU


@dataclass(frozen=True)
class EngineModel(ChatModel):
    """A model that the engine runs."""

    llm: LLM


def open_engine(
    name: str, context: int, seats: int = 0, progress: Progress | None = None, **options: Any
) -> EngineModel:
    """context: the longest document, at most what the model was made for."""
    longest = min(context, read_config(open_checkpoint(name).config).max_position)
    llm = LLM(name, progress, max_seqs=seats or SEATS, max_model_len=longest, **options)
    source = llm.checkpoint
    about = (name, llm.model_config, llm.tokenizer, source.chat_template, source.special, llm.plan.max_model_len)
    return EngineModel(*about, llm)


@dataclass(slots=True)
class _Text:
    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    checked: int = 0  # ids that were searched for loops


class EngineWriter:
    def __init__(self, model: EngineModel, max_len: int, stop_ids: Iterable[int] | None = None, seed: int = 0) -> None:
        """max_len: the longest prompt and response together. stop_ids: none: the model's own."""
        self.engine, self.max_len, self.num_generated = model.llm.engine, max_len, 0
        self.seats = model.llm.plan.max_seqs
        self.stop_ids = tuple(sorted(model.tokenizer.eos_ids if stop_ids is None else stop_ids))
        self._seeds = np.random.default_rng(seed)
        self._texts: dict[str, _Text] = {}

    def run(
        self, prompts: Iterable[Prompt], stopped: Stop = lambda: False, follow: Follow | None = None
    ) -> Iterator[Written]:
        source = iter(prompts)
        try:
            while not stopped():
                while len(self._texts) < self.seats and (prompt := next(source, None)):
                    self._add(prompt)
                if not self._texts:
                    return
                for written in self._step():
                    if follow and (prompt := follow(written)):
                        self._add(prompt)
                    else:
                        yield written
        finally:
            for name in self._texts:
                self.engine.abort(name)
            self._texts.clear()

    def _add(self, prompt: Prompt) -> None:
        room = min(prompt.max_new, self.max_len - len(prompt.ids))
        assert room > 0 and prompt.ids, (len(prompt.ids), prompt.max_new)
        seed = int(self._seeds.integers(1 << 62))
        params = SamplingParams(
            room, temperature=prompt.temperature, seed=seed, stop_ids=self.stop_ids, ignore_eos=True
        )
        self._texts[self.engine.add(list(prompt.ids), params)] = _Text(prompt)

    def _step(self) -> list[Written]:
        """Run one step and return the texts that have ended."""
        ended = []
        for piece in self.engine.step():
            if (text := self._texts.get(piece.request_id)) is None:  # the end of one that was aborted
                continue
            text.ids += piece.ids
            finish = _finish(text, piece.finish)
            if finish is None:
                continue
            if piece.finish is None:
                self.engine.abort(piece.request_id)
            del self._texts[piece.request_id]
            self.num_generated += len(text.ids)
            ids = np.array(text.ids, np.int32)
            ended.append(Written(text.prompt, cut_loop(ids) if finish is Finish.LOOP else ids, finish))
        return ended


def _finish(text: _Text, said: FinishReason | None) -> Finish | None:
    """Return how the text ended, or None. Loops are searched every CHECK ids, and not in texts that ended by
    themselves."""
    if said is FinishReason.STOP:
        return Finish.END
    if said is not None or len(text.ids) >= text.checked + CHECK:
        text.checked = len(text.ids)
        if next(find_loops(text.ids[-RECENT:], LOOP), None):
            return Finish.LOOP
    return None if said is None else Finish.LENGTH
