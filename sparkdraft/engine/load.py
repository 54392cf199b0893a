"""Turns a user's configuration into a model that is ready to run: checkpoint, drafter, plan, tokenizer, engine.

The Python API (llm.py) and the server's backend (engine/backend.py) begin here; engine/build.py builds the engine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from sparkdraft.cache.formats import CALIBRATION, LEARNT_IDS, kv_format
from sparkdraft.config import EngineConfig, usable_defaults
from sparkdraft.core import Fallback, UserError
from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.drafters.find import DraftSource
from sparkdraft.drafters.ngram import NGRAM_DEPTH
from sparkdraft.engine.accept import NotFinite, blamed
from sparkdraft.engine.build import build_engine, find_drafter
from sparkdraft.engine.drafting import check_depths
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.machine import detect, native_problem, plan_here
from sparkdraft.engine.profile import Subject, pick_up
from sparkdraft.models.common.blocks import Decoder
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.keys import unread_names
from sparkdraft.models.common.layers import ExpertsSpec
from sparkdraft.models.registry import read_config
from sparkdraft.plan.resolve import may_decode, model_bytes
from sparkdraft.plan.weight_formats import (
    WeightFormats,
    coded_matrices,
    drafter_at_load,
    of_gguf,
    quantised_at_load,
    stated,
)
from sparkdraft.text.chat import fault_of
from sparkdraft.text.tokenizer import Tokenizer
from sparkdraft.weights.checkpoint import Checkpoint, open_checkpoint
from sparkdraft.weights.hub import FULL
from sparkdraft.weights.loader import Progress
from sparkdraft.weights.plane_layout import PassTimes, StoredBytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run, and what its front ends need beside the engine."""

    checkpoint: Checkpoint
    model_config: ModelConfig
    tokenizer: Tokenizer
    engine: Engine


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose weights are not read yet, its drafter, and the settings to run it with."""

    config: EngineConfig  # with the profile's settings
    checkpoint: Checkpoint
    model_config: ModelConfig
    drafter: DraftSource | None
    subject: Subject  # what a profile of it is about
    fallbacks: list[Fallback]  # about the drafter, the settings, the model's wrong defaults and its chat template

    @property
    def caps(self) -> DrafterCaps | None:
        return drafter_at_load(self.drafter.caps, self.drafter.weights) if self.drafter else None


def open_model(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Opened:
    """Raises UserError for a depth of drafting that the drafter does not reach, before any weight is read. checkpoint:
    read in place of config.model."""
    checkpoint = checkpoint or open_checkpoint(config.model)
    model = read_config(checkpoint.config)
    drafter, chosen, _ = find_drafter(config, model, checkpoint)
    drafts_by = drafter.caps.name if drafter else ""
    subject = Subject.of(detect(config), config.model, checkpoint.config, checkpoint.stored_bytes()[:2], drafts_by)
    most = drafter.caps.max_depth if drafter else NGRAM_DEPTH
    config, said = pick_up(config, subject, most)
    check_depths(config.num_draft, config.depths, most if drafter or config.ngram else 0, bool(drafter))
    fallbacks = [*said, *chosen]
    wrong = usable_defaults(checkpoint.generation)[1]
    fallbacks += [Fallback(f"the model's default {name} is not used", why) for name, why in wrong.items()]
    if fault := fault_of(checkpoint.chat_template, checkpoint.special):
        fallbacks.append(Fallback("chats are refused", fault))
    return Opened(config, checkpoint, model, drafter, subject, fallbacks)


def load(config: EngineConfig, progress: Progress | None = None, checkpoint: Checkpoint | None = None) -> Loaded:
    """progress: called with the number of tensors read so far and of all. checkpoint: read in place of config.model."""
    return load_opened(open_model(config, checkpoint), progress)


def load_opened(opened: Opened, progress: Progress | None = None, weights: Decoder | None = None) -> Loaded:
    """weights: those of another engine, which this one shares."""
    config, checkpoint, model, drafter = opened.config, opened.checkpoint, opened.model_config, opened.drafter
    stored, found = stored_of(config, checkpoint, model, opened.caps), detect(config)
    if weights:  # the plan counts them, and they have been taken from the free memory already
        shared = model_bytes(config, model, found, native_problem(config, found), opened.caps, stored)
        found = replace(found, free_bytes=found.free_bytes + shared)
    plan = plan_here(config, model, opened.caps, stored, found)
    tokenizer = Tokenizer.of(checkpoint)
    learns = kv_format(plan.kv).learns(config)
    text = tokenizer.encode(CALIBRATION.read_text(encoding="utf-8")) if learns else []
    calibration = text[: min(LEARNT_IDS, model.max_position)]
    engine = build_engine(
        plan, config, model, checkpoint, tokenizer, drafter, progress, calibration, opened.fallbacks, weights
    )
    try:
        engine.warm_up()
    except NotFinite as error:
        raise NotFinite(blamed(checkpoint)) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = os.environ.get("TRITON_CACHE_DIR") or "~/.triton"
        raise UserError(
            f"The disk is full, and the GPU kernels that are compiled at load are kept in {place}: make room, or set "
            "TRITON_CACHE_DIR to a folder on another disk."
        ) from error
    return Loaded(checkpoint, model, tokenizer, engine)


class Sized(Protocol):
    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes: ...


def stored_of(
    config: EngineConfig, checkpoint: Sized, model: ModelConfig, drafter: DrafterCaps | None = None
) -> StoredBytes:
    """What a GPU keeps of a checkpoint: as it is stored, or as --weights quantises it. A head in the target's file that
    drafts stays floats. Where memory is not short, quantised matrices are timed too."""
    stored = checkpoint.stored_bytes(unread_names(drafts=bool(drafter and drafter.num_in_target)))
    if torch.cuda.is_available() and may_decode(config, model, detect(config), drafter, stored):
        return stored._replace(times=_pass_times(checkpoint, model))
    if config.weights == "auto" or stored.quantised:
        return stored
    made = quantised_at_load(model, config.weights)
    return made._replace(floats=made.floats + drafter.num_in_target) if drafter else made


def _pass_times(checkpoint: Sized, model: ModelConfig) -> PassTimes | None:
    """None: the file does not say how its matrices are stored, or holds experts, whose tokens do not read all of
    them."""
    from sparkdraft.weights.gguf import GgufCheckpoint

    if any(isinstance(layer.mlp, ExpertsSpec) for layer in model.layers):
        return None
    formats: WeightFormats | None = None
    if isinstance(checkpoint, GgufCheckpoint):
        formats = of_gguf(checkpoint.matrix_types())
    else:
        with suppress(UserError):  # the config does not say it in words that are known; the tensors will
            formats = stated(getattr(checkpoint, "config", {}), model.num_layers)
    matrices = coded_matrices(model, formats) if formats else []
    if not matrices:
        return None
    from sparkdraft.kernels.cuda.linear.speed import pass_times

    return pass_times(matrices)
