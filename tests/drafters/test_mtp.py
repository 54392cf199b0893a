"""MTP heads step by step against transformers' own layers, and what happens to a head that is not whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.base import Anchors
from sparkdraft.drafters.mtp import MtpHead
from sparkdraft.engine.engine import Engine
from tests.drafters.tiny_mtp import VARIANTS, Mtp, expected_drafts, write_target
from tests.fakes.steps import on_device
from tests.models.recurrent import load

PROMPT = [(7 * i * i + 31 * i) % 250 + 3 for i in range(21)]
MISTAKES = ("hidden first", "before the norm", "the same id", "a later position")


class Pass(NamedTuple):
    length: int  # of the committed text, the anchor included
    number: int  # of the draft within its step
    logits: Tensor  # [vocab]


@pytest.fixture(scope="module", params=VARIANTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mtp]:
    return write_target(tmp_path_factory.mktemp(request.param), request.param)


def head_of(llm: LLM) -> MtpHead:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, MtpHead)
    return proposer.drafter


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pass]]:
    """Every pass of a head over one sequence."""
    found: list[Pass] = []
    score = MtpHead._score

    def spy(self: MtpHead, anchors: Anchors, seqs: int, likeliest: bool) -> Tensor:
        logits = score(self, anchors, seqs, False)
        length = int(anchors.length[0])
        if seqs == 1:
            found.append(Pass(length, int(self._length[0]) + 1 - length, logits[0].clone()))
        return logits.argmax(-1) if likeliest else logits

    monkeypatch.setattr(MtpHead, "_score", spy)
    yield found


def steps_of(passes: list[Pass], depth: int) -> list[list[Pass]]:
    """Those that drafted so many ids; the last steps of a text draft fewer."""
    begins = [i for i, each in enumerate(passes) if not each.number] + [len(passes)]
    return [passes[first:after] for first, after in pairwise(begins) if after - first == depth]


def errors(folder: Path, head: Mtp, text: list[int], steps: list[list[Pass]]) -> Tensor:
    """The largest differences from the oracle's logits, [steps, depth]."""
    found = []
    for step in steps:
        assert [each.number for each in step] == list(range(len(step))) and len({each.length for each in step}) == 1
        logits = torch.stack([each.logits for each in step])
        drafts = logits[:-1].argmax(-1).tolist()
        expected = expected_drafts(folder, head, text, step[0].length, drafts)
        found.append((logits - expected).abs().amax(-1))
    return torch.stack(found)


def test_each_draft_is_the_oracles(made: tuple[Path, Mtp], passes: list[Pass], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt chunks, rows that waited and rows of rejected drafts are all behind these logits, in the host's steps and
    in the device's."""
    folder, head = made
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)  # which only measures, and takes most of the time here
    llm = load(folder, drafter="mtp", spec="3", dtype="float32", max_step_tokens=16, max_seqs=2, prefix_cache=False)
    for one in (llm, on_device(llm)):
        passes.clear()
        written = one.generate([PROMPT], SamplingParams(14, ignore_eos=True))[0].completions[0].ids
        steps = [step for step in steps_of(passes, 3) if step[0].length <= len(PROMPT) + len(written)]
        assert len(steps) >= 8
        assert errors(folder, head, PROMPT + written, steps).max() < 1e-4


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_oracle_sees_mistakes(made: tuple[Path, Mtp], mistake: str) -> None:
    """Each moves the logits by far more than the tolerance, in the first draft already."""
    folder, head = made
    drafts = [40, 50]
    right, wrong = (expected_drafts(folder, head, PROMPT, 20, drafts, each) for each in ("", mistake))
    assert (right - wrong).abs().amax(-1).min() > 1e-2, mistake
