"""The drafter in training against the drafter in service: the same block, the same logits, whatever lies around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkdraft.drafters.base import SeenContext
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.models.common.config import uniform_config
from sparkdraft.train.batches import Batches
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.drafter_config import drafter_config, find_mask_id, spread_aux_layers
from sparkdraft.train.fit import Trainer
from sparkdraft.train.memory import CHUNKS, LAID_OUT
from sparkdraft.train.model import folded, take_rows
from sparkdraft.train.settings import FitSettings
from sparkdraft.train.target import Features, Target, load_target
from tests.drafters.tiny_drafter import DraftHarness, write_drafter


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return load_target(str(tiny), "cpu", 128)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(3)
    with CorpusWriter(folder, CorpusInfo("tiny", 320, ("any",))) as writer:
        for _ in range(40):
            prompt, response = rng.integers(1, 9), rng.integers(2, 40)
            writer.add(rng.integers(3, 250, prompt + response), int(prompt), "any", Finish.LENGTH, 0.0)
    return Corpus(folder)


def settings(**changes: object) -> FitSettings:
    values = {"layers": 2, "block": 8, "context": 160, "block_rows": 96, "longest": 64, "steps": 4, **changes}
    return FitSettings(target="tiny", data="corpus", **values)  # type: ignore[arg-type]


def trainer_of(target: Target, corpus: Corpus, **changes: object) -> Trainer:
    asked = settings(**changes)
    return Trainer(asked, target, corpus, DFlashConfig.read(drafter_config(target.config, asked, 300)))


def test_a_block_in_training_is_the_block_in_service(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    trainer = trainer_of(target, corpus)
    batch = trainer.batches.take(0)
    aux_hidden, _ = trainer.features(batch)
    trainer.model.scale_aux(aux_hidden, keep=False)
    for parameter in trainer.model.parameters():  # weights at birth are too alike to tell rows apart
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3 if parameter.dim() == 1 else 0.15)
    blocks = trainer.block_ids(batch)
    embedded = torch.nn.functional.embedding(blocks.flatten(), target.decoder.embedding)
    with torch.no_grad():
        hidden = trainer.model(batch, aux_hidden, embedded).view(*blocks.shape, -1)
        trained = hidden[:, 1:] @ target.decoder.head.weight.t()
    weights = {name: value.contiguous() for name, value in folded(trainer.model.state_dict()).items()}
    folder = write_drafter(tmp_path, drafter_config(target.config, settings(), 300), weights)
    harness = DraftHarness(target.decoder, folder)
    for j in range(0, len(blocks), 3):
        start, anchor = int(batch.starts[j]), int(batch.anchors[j])
        if anchor > start:
            harness.observe({f"block {j}": aux_hidden[start:anchor].view(anchor - start, 3, -1)})
        served = harness.propose({f"block {j}": int(batch.ids[anchor])}, width=batch.width)[f"block {j}"]
        torch.testing.assert_close(served, trained[j], rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Conversations of up to a hundred tokens among short texts."""
    folder, rng = tmp_path_factory.mktemp("long"), np.random.default_rng(4)
    with CorpusWriter(folder, CorpusInfo("tiny", 320, ("any",))) as writer:
        for i in range(120):
            length = int(rng.integers(3, 20) if i % 6 else rng.integers(90, 110))
            answers = [(b, min(b + 9, length)) for b in range(2, length - 1, 14)]
            writer.add(rng.integers(3, 250, length), 2, "any", Finish.LENGTH, 0.0, answers)
    return Corpus(folder)


@pytest.mark.parametrize(("first", "last"), [(3, 10), (0, 7), (1, 40)])
def test_a_block_is_shown_the_beginning_and_the_end(long_corpus: Corpus, first: int, last: int) -> None:
    sees = SeenContext(first, last)
    batches = Batches(long_corpus, 256, 160, (8, 4), 110, seed=2, sees=sees)
    most = 0
    for step in range(12):
        batch = batches.take(step)
        assert (
            len(batch.seen) == LAID_OUT * 256 and (batch.starts.diff() >= 0).all() and (batch.stops.diff() >= 0).all()
        )
        for anchor, start, stop in zip(
            batch.anchors.tolist(), batch.starts.tolist(), batch.stops.tolist(), strict=True
        ):
            begin = anchor - int(batch.positions[anchor])
            shown = batch.seen[start:stop].tolist()
            tail = list(range(max(begin, anchor - last), anchor))
            assert shown == sorted(set(shown)) and set(range(begin, min(begin + first, anchor))) <= set(shown)
            assert shown[len(shown) - len(tail) :] == tail and set(shown) <= set(range(begin, anchor))
            assert (
                len(shown) < first + last + -(-(first + last) // CHUNKS)
                and shown[first:] == list(range(anchor))[anchor - len(shown[first:]) :]
            )
            most = max(most, int(batch.positions[anchor]))
    assert most > 85, "anchors are drawn from the ends of long documents too"


def test_what_a_block_is_not_shown_does_not_matter(target: Target, long_corpus: Corpus) -> None:
    trainer = trainer_of(target, long_corpus, window=12, sinks=3, context=256, longest=110)
    assert trainer.draft.sees == SeenContext(3, 12)
    batch = trainer.batches.take(0)
    aux_hidden, _ = trainer.features(batch)
    blocks = trainer.block_ids(batch)
    embedded = torch.nn.functional.embedding(blocks, target.decoder.embedding)
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3 if parameter.dim() == 1 else 0.15)
    with torch.no_grad():
        together = trainer.model(batch, aux_hidden, embedded.flatten(0, 1)).view(*blocks.shape, -1)
        for j in range(0, len(blocks), 5):
            anchor = batch.anchors[j : j + 1]
            shown = batch.seen[batch.starts[j] : batch.stops[j]]
            rows = torch.cat((shown, anchor)).long()
            zero, end = torch.zeros(1, dtype=torch.int32), torch.tensor([len(shown)], dtype=torch.int32)
            alone = replace(
                batch, ids=batch.ids[rows], positions=batch.positions[rows], anchors=end, starts=zero, stops=end,
                seen=shown[:0],
            )  # fmt: skip
            served = trainer.model(alone, aux_hidden[rows], embedded[j]).view(batch.width, -1)
            torch.testing.assert_close(together[j], served, rtol=1e-4, atol=1e-4)


def test_rows_that_are_taken_twice_have_both_gradients() -> None:
    x, rows = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True), torch.tensor([4, 1, 1, 0])
    weight = torch.randn(4, 2, 3, dtype=torch.float64)
    ours = torch.autograd.grad((take_rows(x, rows) * weight).sum(), x)[0]
    torch.testing.assert_close(ours, torch.autograd.grad((x[rows] * weight).sum(), x)[0], rtol=1e-6, atol=1e-6)


def test_long_documents_are_not_cut_where_short_ones_can_be(long_corpus: Corpus) -> None:
    batches, whole = Batches(long_corpus, 256, 160, (8,), 110, seed=2), 0
    for step in range(30):
        batch = batches.take(step)
        order = batch.bounds.diff().tolist()
        whole += order[-1] <= 32 or order[-1] >= 90
    assert whole >= 24, "the last document of a batch is a short one, or whole"


def test_taps_are_those_of_each_document_alone(target: Target, corpus: Corpus) -> None:
    batch = Batches(corpus, 160, 96, (8,), 64, seed=1).take(0)
    aux_hidden, logits = Features(target, (0, 2), 160, 64, target.decoder.head)(batch)
    assert logits is not None and logits.shape == (160, 320)
    for first, last in zip(batch.bounds[:-1].tolist(), batch.bounds[1:].tolist(), strict=True):
        alone = Features(target, (0, 2), last - first, 64)
        piece = type(batch)(
            batch.ids[first:last],
            torch.tensor([0, last - first], dtype=torch.int32),
            batch.positions[first:last],
            *(batch.anchors[:0], batch.starts[:0], batch.stops[:0], batch.seen, batch.labels[:0]),
            batch.temperature[:0],
            width=8,
        )
        torch.testing.assert_close(alone(piece)[0], aux_hidden[first:last], rtol=1e-3, atol=1e-3)


def test_batches_are_responses_and_their_labels(corpus: Corpus) -> None:
    batches = Batches(corpus, 160, 96, (8, 4), 64, seed=5)
    widths = set()
    for step in range(12):
        batch = batches.take(step)
        widths.add(batch.width)
        ids, bounds = batch.ids.numpy(), batch.bounds.numpy()
        assert bounds[-1] == 160 == len(ids) and len(batch.anchors) == 96 // batch.width
        for anchor, start, labels in zip(batch.anchors.tolist(), batch.starts.tolist(), batch.labels, strict=True):
            document = int(np.searchsorted(bounds, anchor, side="right")) - 1
            end = bounds[document + 1]
            assert bounds[document] == start and anchor + 1 < end
            expected = [int(ids[p]) if p < end else -1 for p in range(anchor + 1, anchor + batch.width)]
            assert labels.tolist() == expected
    assert widths == {8, 4}
    assert batches.cursor.epoch > 0, "the corpus is short: this went round"


def test_long_documents_are_cut_and_few_anchors_are_used_again(corpus: Corpus) -> None:
    assert int(corpus.length.max()) > 12
    batches = Batches(corpus, 30, 96, (8,), 12, seed=5)
    for step in range(20):
        batch = batches.take(step)
        assert int(batch.bounds.diff().max()) <= 12 and int(batch.positions.max()) < 12
        assert len(batch.anchors) == 12 and (batch.labels[:, 0] >= 0).all()


def test_no_document_is_longer_than_the_target_has_positions(corpus: Corpus, target: Target) -> None:
    assert target.context == 128
    assert trainer_of(target, corpus, longest=4096, context=512).batches.longest == 128


def test_a_cursor_gives_the_same_batches_again(corpus: Corpus) -> None:
    first, second = (Batches(corpus, 160, 96, (8, 4), 64, seed=5) for _ in range(2))
    for step in range(5):
        first.take(step)
    second.cursor = first.cursor
    for step in range(5, 9):
        one, other = first.take(step), second.take(step)
        assert torch.equal(one.ids, other.ids) and torch.equal(one.anchors, other.anchors)


def test_taps_and_mask_are_chosen_from_the_target() -> None:
    assert spread_aux_layers(30) == (1, 8, 14, 20, 27)  # those of the drafter that came with the embedded model
    assert spread_aux_layers(36) == (1, 9, 17, 25, 33)  # as z-lab's for Qwen3-8B
    assert spread_aux_layers(3) == (0, 1, 2)
    rows = torch.randn(20, 4)
    assert find_mask_id(rows, tokenizer_size=17) == 17
    rows[7] = rows[11]
    assert find_mask_id(rows, tokenizer_size=20) == 11


def test_a_target_without_the_tapped_block_is_refused() -> None:
    config = uniform_config("llama", 3, 96, 160, 6, 2, 32, 320, 512)
    with pytest.raises(Exception, match="has layers 0 to 2"):
        drafter_config(config, settings(aux_layers=(0, 3)), 300)
