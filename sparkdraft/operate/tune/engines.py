"""Measures settings: builds an engine for each over the same weights, and runs the user's prompts through it.

Every run is the same work: whole requests, greedy, of a fixed length, without the prefix cache. Warm-up runs of an
engine are not counted. Caches are only as large as the loads need, so that two engines fit side by side; whether a
setting fits with the cache of a real server is asked of the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdraft.core import SamplingParams, UserError
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import Opened, load_opened, stored_of
from sparkdraft.engine.machine import detect, plan_here
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.operate.bench.offline import throughput
from sparkdraft.operate.tune.search import BURST, LONG, ONE, SEVERAL, TILES, Options, Run
from sparkdraft.plan.resolve import MOST_AHEAD, Plan
from sparkdraft.speculation.budget import depth_choices
from sparkdraft.text import chat
from sparkdraft.text.style import chat_style
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.loader import Progress

KEPT = 2  # engines at a time: the old settings' and the new ones'
STREAMS = 4  # of "several streams"
BURST_FACTOR = 2  # requests of a burst, in requests that run at once by default
LONG_FACTOR = 2  # tokens of the long prompt, in tokens of a step
AFTER_LONG = 4  # tokens written after it
MOST_WARM, STEADY = 4, 0.9  # runs that are not counted, at most; a run that takes this much of the one before is steady
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Load:
    prompts: list[list[int]]
    streams: int
    output_len: int
    counts_prompts: bool = False  # its speed is that of reading, not of writing

    @property
    def tokens(self) -> int:
        """Tokens of cache if all requests run at once."""
        return sum(len(ids) + self.output_len + MOST_AHEAD for ids in self.prompts)


def make_loads(prompts: Sequence[list[int]], plan: Plan, output_len: int) -> dict[str, Load]:
    """prompts: ids of the user's prompts; they are cut to fit the context, and joined for the long prompt."""
    room = plan.max_model_len - output_len - MOST_AHEAD
    if room < 1:
        most = plan.max_model_len - MOST_AHEAD - 1
        context = f"a context of {plan.max_model_len} tokens"
        raise UserError(f"--output-len is {output_len}; with {context} it must be {most} or less")
    fit = [ids[:room] for ids in prompts]
    burst = BURST_FACTOR * plan.max_seqs
    many = [fit[i % len(fit)] for i in range(max(burst, STREAMS))]
    joined = [token for ids in many for token in ids]
    length = min(LONG_FACTOR * plan.max_step_tokens, room)
    long = (joined * -(-length // len(joined)))[:length]
    return {
        ONE: Load(many[:2], 1, output_len),
        SEVERAL: Load(many[:STREAMS], STREAMS, output_len),
        BURST: Load(many[:burst], burst, max(output_len // 2, 1)),
        LONG: Load([long], 1, AFTER_LONG, counts_prompts=True),
    }


def prompt_ids(opened: Opened, texts: Sequence[str]) -> list[list[int]]:
    """Encode each text as a user's message, or as it is if the model has no chat template."""
    checkpoint, tokenizer = opened.checkpoint, Tokenizer.of(opened.checkpoint)
    template = checkpoint.chat_template
    if not template:
        return [tokenizer.encode(text) for text in texts]
    usual = chat_style(opened.model_config.model_type, template).thinking.variables(None)
    asked = [[{"role": "user", "content": text}] for text in texts]
    made = (chat.prompt_text(tokenizer.control, template, each, checkpoint.special, variables=usual) for each in asked)
    return [tokenizer.encode_chat(text) for text in made]


class Engines:
    def __init__(self, opened: Opened, texts: Sequence[str], output_len: int, progress: Progress | None = None) -> None:
        """texts: the user's prompts. progress: of loading the weights."""
        self.opened, self._progress = opened, progress
        self._machine = detect(opened.config)  # as a server would find it, without any engine
        self.tables: Any = None  # the tiles that were found, if they were searched
        self.plan = self._full_plan({})
        self.loads = make_loads(prompt_ids(opened, texts), self.plan, output_len)
        self._room = max(load.tokens for load in self.loads.values())
        self.model: Decoder | None = None  # of the first engine
        self._loaded, self._warm = dict[Key, Engine](), set[tuple[Key, str]]()

    @property
    def uncounted(self) -> int:
        """The most warm-up runs of an engine."""
        return MOST_WARM if self.plan.device == "cuda" else 1

    @property
    def depths(self) -> list[int]:
        """The depths that the engine chooses from; [0] without a drafter."""
        drafter, config = self.opened.drafter, self.opened.config
        return depth_choices(drafter.caps.max_depth, None, config.depths, drafter.caps.chain) if drafter else [0]

    def speed(self, options: Options, name: str) -> Run:
        """Run a load once and return its speed. Raises UserError for settings that do not fit."""
        key = tuple(sorted(options.items()))
        engine = self._engine(key)
        if (key, name) not in self._warm:
            self._warm_up(engine, self.loads[name])
            self._warm.add((key, name))
        return self._run(engine, self.loads[name])

    # ---- the parts

    def _warm_up(self, engine: Engine, load: Load) -> None:
        """Warm up: one run, and on a GPU as many as find new shapes of steps to capture."""
        last = self._run(engine, load).seconds
        for _ in range(self.uncounted - 1):
            seconds = self._run(engine, load).seconds
            if seconds > STEADY * last:
                return
            last = seconds

    def _run(self, engine: Engine, load: Load) -> Run:
        params = SamplingParams(load.output_len, ignore_eos=True)
        result = throughput(engine, [(ids, params) for ids in load.prompts], load.streams)
        tokens = sum(map(len, load.prompts)) if load.counts_prompts else result.tokens
        return Run(tokens / result.seconds, result.seconds)

    def _engine(self, key: Key) -> Engine:
        if key not in self._loaded:
            while len(self._loaded) >= KEPT:
                self._drop(next(iter(self._loaded)))
            self._loaded[key] = self._build(dict(key))
        engine = self._loaded[key] = self._loaded.pop(key)  # the last one used is last
        self._activate(engine.plan, dict(key))
        return engine

    def _build(self, options: dict[str, Any]) -> Engine:
        full = self._full_plan(options)
        for name in ("max_seqs", "max_step_tokens"):
            if name in options and getattr(full, name) < options[name]:
                raise UserError(f"{name} would be {getattr(full, name)}, for lack of memory")
        self._activate(full, options)
        config = replace(self._config(options), prefix_cache=False, kv_tokens=self._room)
        engine = load_opened(replace(self.opened, config=config), self._progress, self.model).engine
        self.model = engine.runner.model
        return engine

    def _drop(self, key: Key) -> None:
        del self._loaded[key]
        self._warm = {each for each in self._warm if each[0] != key}
        gc.collect()
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()

    def _activate(self, plan: Plan, options: dict[str, Any]) -> None:
        """Apply the settings of the whole process: threads, and the tiles of kernels."""
        torch.set_num_threads(1 if plan.kernels == "native" else plan.threads)
        if plan.kernels == "native":
            from sparkdraft.kernels import native

            native.set_threads(plan.threads)
        if self.tables is not None:
            self.tables.use(bool(options.get(TILES)))

    def _config(self, options: Options) -> Any:
        return replace(self.opened.config, **{name: value for name, value in options.items() if name != TILES})

    def _full_plan(self, options: Options) -> Plan:
        config, model, caps = self._config(options), self.opened.model_config, self.opened.caps
        stored = stored_of(config, self.opened.checkpoint, model, caps)
        return plan_here(config, model, caps, stored, self._machine)
