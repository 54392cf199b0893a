"""`train fit`: trains a drafter from a corpus and a frozen target.

A step runs the target over packed text and the drafter over masked blocks at random anchors of it, and updates the
drafter's weights. The host waits for the device only to report. Everything random is a function of the seed and the
step, so a run killed at any instant continues from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.engine.machine import detect
from sparkdraft.models.registry import read_config
from sparkdraft.train.batches import Batches, TrainBatch
from sparkdraft.train.corpus import Corpus
from sparkdraft.train.drafter_config import draft_ids, drafter_config, find_mask_id, grown_config, trained_weights
from sparkdraft.train.loss import Labels, LossOptions, LossReport, draft_loss
from sparkdraft.train.memory import fit_in
from sparkdraft.train.model import WIDEST, DraftModel
from sparkdraft.train.optimizer import Optimizer
from sparkdraft.train.process import Stop, stop_signals
from sparkdraft.train.run import Run, RunInfo, State
from sparkdraft.train.settings import MUON_LR, FitSettings
from sparkdraft.train.target import Features, Target, load_target
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.linear import DenseLinear
from sparkdraft.weights.loader import Progress

REPORT = 50  # steps between two lines of the log; a checkpoint has a line of its own
EAGER = 3  # steps of a shape before its CUDA graph is captured
DOCUMENTS = 64  # batches are padded to a multiple of this number of documents: the target's attention visits them all

Report = Callable[[dict[str, float]], None]
Loading = Callable[[], AbstractContextManager[Progress | None]]  # entered while the target is loaded
Say = Callable[[str], None]
Begin = Callable[[int, float], None]  # told the step that training begins with, and the seconds it has taken so far


class Trainer:
    """The drafter in training; `step` runs one training step."""

    def __init__(self, settings: FitSettings, target: Target, corpus: Corpus, draft: DFlashConfig) -> None:
        self.settings, self.target, self.draft = settings, target, draft
        longest = min(settings.longest, settings.context, target.context)  # the target has no positions beyond
        self.batches = Batches(
            corpus, settings.context, settings.block_rows, settings.all_widths, longest, settings.seed, draft.sees
        )
        self.head, self.place = _head_of(target, corpus, settings)
        teach = DenseLinear(self.head) if settings.soft else None
        self.features = Features(target, draft.aux_layers, settings.context, longest, teach)
        torch.manual_seed(settings.seed)
        self.model = DraftModel(draft, longest, compiled=target.device.type == "cuda").to(target.device)
        with torch.no_grad():  # the head expects the output of this norm
            self.model.norm.weight.copy_(target.decoder.norm.gain)
        if settings.init:
            self.model.begin_from(trained_weights(settings.init))
        self.optimizer = Optimizer(self.model, settings.lr or MUON_LR, settings.vector_lr)
        self.options = LossOptions(settings.alpha, settings.soft)
        self.meter = Meter(max(settings.all_widths), target.device)
        self.fresh = True  # until the first step has measured the size of the hidden states
        self.learn = self._learn if target.device.type == "cpu" else StepGraphs(self._learn, target.device)

    def step(self, number: int) -> None:
        self.optimizer.set_rate(self.settings.rate(number))
        self.learn(self.batches.take(number))

    def _learn(self, batch: TrainBatch) -> None:
        aux_hidden, teacher = self.features(batch)
        if self.fresh:
            self.model.scale_aux(aux_hidden, keep=bool(self.settings.init))
            self.fresh = False
        report = self.loss(batch, aux_hidden, teacher)
        report.loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.meter.add(report, batch)

    def loss(self, batch: TrainBatch, aux_hidden: Tensor, teacher: Tensor | None) -> LossReport:
        blocks = self.block_ids(batch)
        embedding = self.target.decoder.embedding
        assert isinstance(embedding, Tensor)
        hidden = self.model(batch, aux_hidden, F.embedding(blocks.flatten(), embedding))
        drafted = hidden.view(*blocks.shape, -1)[:, 1:].contiguous()  # [A, W - 1, hidden]
        return draft_loss(drafted, self.head, self.labels(batch, teacher), self.options)

    def block_ids(self, batch: TrainBatch) -> Tensor:  # int64 [A, W]
        anchors = batch.ids[batch.anchors.long()].long()
        return F.pad(anchors.unsqueeze(1), (0, batch.width - 1), value=self.draft.mask_token_id)

    def labels(self, batch: TrainBatch, teacher: Tensor | None) -> Labels:
        """Sampled text is taught by the distribution it was sampled from; greedy text by its own ids."""
        ids = batch.labels if self.place is None else self.place[batch.labels]
        if teacher is None:
            return Labels(ids)
        before = batch.anchors.long().unsqueeze(1) + torch.arange(batch.width - 1, device=teacher.device)
        soft = (batch.temperature > 0).unsqueeze(1) & (ids >= 0)
        warmth = torch.where(batch.temperature > 0, 1 / batch.temperature, 1.0)
        rows = torch.where(soft, before, -1)
        return Labels(ids, teacher, rows, warmth.unsqueeze(1).expand_as(rows).contiguous())

    def state(self, step: int, seconds: float) -> State:
        model = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        ids = None if self.place is None else (self.place[:-1] >= 0).nonzero().flatten()
        return State(step, self.batches.cursor, seconds, model | self.optimizer.state(), ids)

    def restore(self, state: State) -> None:
        expected = {name: tensor.shape for name, tensor in self.state(0, 0.0).tensors.items()}
        if {name: tensor.shape for name, tensor in state.tensors.items() if name in expected} != expected:
            raise UserError(
                "the checkpoint is of another run: put this one's state.safetensors back, or begin a new one"
            )
        self.fresh = False
        self.model.load_state_dict(state.model())
        self.optimizer.load(state.tensors)
        self.batches.cursor = state.cursor


def _head_of(target: Target, corpus: Corpus, settings: FitSettings) -> tuple[Tensor, Tensor | None]:
    """Return the rows of the target's head for the ids that are drafted, and a map from id to row.

    The map is None if all ids are drafted. It is -1 for the other ids, and for -1, which stands for "no label".
    """
    head = target.decoder.head.rows()
    assert isinstance(head, Tensor), "a target in training is kept as floats"
    if not settings.vocab:
        return head, None
    ids = draft_ids(settings, corpus, settings.vocab).to(target.device)
    place = torch.full((len(head) + 1,), -1, device=target.device)
    place[ids] = torch.arange(len(ids), device=target.device)
    return head[ids], place


class Meter:
    """Sums on the device, read once per report."""

    def __init__(self, widest: int, device: torch.device) -> None:
        self.widest = widest
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, report: LossReport, batch: TrainBatch) -> None:
        correct = report.correct
        accepted = correct.long().cumprod(1).sum(1)
        widest = batch.width == self.widest  # acceptance lengths of narrower blocks are not comparable
        one = torch.ones((), device=correct.device)
        parts = (report.loss, one, correct[:, 0].float().mean(), accepted.float().mean() * widest, one * widest)
        self.sums += torch.stack([part.double() for part in parts])

    def read(self) -> dict[str, float]:
        """Return the means since the last call; empty if no step was run."""
        loss, steps, first, accepted, wide = self.sums.tolist()
        self.sums.zero_()
        if not steps:
            return {}
        length = {"length": 1 + accepted / wide} if wide else {}  # no step had blocks of the full width
        return {"loss": loss / steps, "first": first / steps, **length}


@dataclass(slots=True)
class Shape:
    batch: TrainBatch  # the buffers that the graph reads
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class StepGraphs:
    """Runs a training step as one CUDA graph: launching its thousand small kernels takes longer than running them.

    The first steps of each shape run eagerly, because kernels are compiled and chosen there. Then the step is captured
    and replayed over fixed input buffers, so everything that changes between steps must be a tensor.
    """

    def __init__(self, run: Callable[[TrainBatch], None], device: torch.device) -> None:
        self.run, self.device, self.eager = run, device, EAGER
        self.shapes: dict[tuple[int, int], Shape] = {}

    def __call__(self, batch: TrainBatch) -> None:
        shape = self._place(batch.padded(DOCUMENTS))
        shape.steps += 1
        if shape.steps <= self.eager:
            self.run(shape.batch)
            return
        if shape.graph is None:
            shape.graph = self._capture(shape.batch)
        shape.graph.replay()

    def _place(self, batch: TrainBatch) -> Shape:
        """Copy the batch into its shape's buffers on the device."""
        key = batch.width, len(batch.bounds)
        if key not in self.shapes:
            buffers: dict[str, Any] = {
                name: torch.empty_like(t, device=self.device) for name, t in batch.tensors().items()
            }
            self.shapes[key] = Shape(replace(batch, **buffers))
        held = self.shapes[key].batch.tensors()
        for name, tensor in batch.tensors().items():
            held[name].copy_(tensor.pin_memory(), non_blocking=True)
        return self.shapes[key]

    def _capture(self, batch: TrainBatch) -> torch.cuda.CUDAGraph:
        """Capture the step without running it; the caller replays the graph."""
        pool = next((s.graph.pool() for s in self.shapes.values() if s.graph), None)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(self.device)):
            self.run(batch)
        return graph


def prepare(
    settings: FitSettings, device: str, progress: Progress | None, shrinks: Collection[str] = (), say: Say = print
) -> tuple[RunInfo, Target, Corpus]:
    """Open everything a run needs, checking what can be checked before the target's weights are read."""
    corpus = Corpus(Path(settings.data))
    checkpoint = open_checkpoint(settings.target)
    config = read_config(checkpoint.config)
    if corpus.info.vocab_size != config.vocab_size:
        raise UserError(
            f"{settings.data} was written by {corpus.info.target}, whose vocabulary has {corpus.info.vocab_size} ids; "
            f"{settings.target} has {config.vocab_size}: make data with this target"
        )
    if settings.init:
        grown_config(settings, config)
    else:
        drafter_config(config, settings, max(settings.mask_id, 0))
    hardware = detect(EngineConfig(device=device))
    on_gpu, width = hardware.device == "cuda", max(settings.all_widths)
    if on_gpu and width > WIDEST:
        raise UserError(
            f"blocks of {width} rows were asked for; a GPU trains {WIDEST} at most: lower --block or --widths"
        )
    settings, note = fit_in(config, settings, hardware.free_bytes, on_gpu, shrinks)
    if note:
        say(note)
    target = load_target(settings.target, device, settings.longest, progress)
    return RunInfo(settings, _draft_of(settings, target, corpus), corpus.fingerprint), target, corpus


def _draft_of(settings: FitSettings, target: Target, corpus: Corpus) -> dict[str, Any]:
    """The drafter's config, with the longest text that it will have seen in this run or the runs before."""
    seen = min(int(corpus.length.max()), settings.longest, settings.context, target.context)
    config = _config_of(settings, target)
    return config | {"trained_context": max(seen, int(config.get("trained_context", 0)))}


def _config_of(settings: FitSettings, target: Target) -> dict[str, Any]:
    if settings.init:
        return grown_config(settings, target.config)
    embedding, mask = target.decoder.embedding, settings.mask_id
    assert isinstance(embedding, Tensor)
    if mask < 0:
        mask = find_mask_id(embedding, target.tokenizer.vocab_size)
    return drafter_config(target.config, settings, mask)


def fit(
    settings: FitSettings, folder: Path, device: str = "auto", every: int = 1000, report: Report = lambda entry: None,
    loading: Loading = nullcontext, shrinks: Collection[str] = (), say: Say = print, stopped: Stop = lambda: False,
    begin: Begin = lambda step, seconds: None, done: Callable[[int], None] = lambda step: None,
) -> int:  # fmt: skip
    """Train up to settings.steps, from the folder's last checkpoint on, and save a checkpoint every 'every' steps.

    Returns the number of steps done, which is lower if the run was ended early.

    shrinks: settings left at their defaults, which are lowered if they do not fit; a resumed run keeps its own.
    say: told what was lowered.
    stopped: ends the run like a signal.
    begin: called once before the first step.
    done: called after each step with the number of steps.
    """
    run = Run(folder)
    settings = run.as_before(settings, shrinks)
    run.check(settings, Corpus(Path(settings.data)).fingerprint)
    with run.alone():
        with loading() as progress:
            info, target, corpus = prepare(settings, device, progress, () if run.info_file.exists() else shrinks, say)
        trainer = Trainer(info.settings, target, corpus, DFlashConfig.read(info.draft))
        step, before = 0, 0.0
        if state := run.begin(info):
            trainer.restore(state)
            step, before = state.step, state.seconds
        run.rewind_log(step)
        with stop_signals() as signals, stream_of(target.device):
            begin(step, before)
            return train(trainer, run, step, before, every, report, lambda: signals() or stopped(), done)


def train(
    trainer: Trainer, run: Run, step: int, before: float, every: int, report: Report, asked_to_stop: Stop,
    done: Callable[[int], None] = lambda step: None,
) -> int:  # fmt: skip
    """Train from 'step' on, after 'before' seconds of training. Returns the step reached, which has a checkpoint unless
    it is 0."""
    steps, begin, stop, saved = trainer.settings.steps, time.perf_counter(), asked_to_stop(), step
    while step < steps and not stop:
        trainer.step(step)
        step += 1
        done(step)
        # asked once per step: a signal that comes while the host waits for the device counts for the next step
        stop = asked_to_stop()
        due = stop or step == steps or step % every == 0
        if not (due or step % REPORT == 0):
            continue
        measured = trainer.meter.read()  # waits for the device
        seconds = before + time.perf_counter() - begin
        if measured:
            if not math.isfinite(measured["loss"]):
                raise UserError(
                    f"the loss is not a number after step {step}; the last checkpoint is kept: begin a new run, "
                    "with a lower --lr"
                )
            entry = {"step": step, "seconds": round(seconds, 2), "rate": trainer.settings.rate(step - 1)}
            entry |= {name: round(value, 4) for name, value in measured.items()}
            run.add_log(entry)
            report(entry)
        if due and step > saved:
            run.save(trainer.state(step, seconds))
            saved = step
    return step


def stream_of(device: torch.device) -> AbstractContextManager[object]:
    """A side stream for all of training: the default stream does not allow graph capture."""
    if device.type == "cpu":
        return nullcontext()
    torch.cuda.synchronize(device)
    return torch.cuda.stream(torch.cuda.Stream(device))
