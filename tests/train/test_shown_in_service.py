"""A drafter that is shown a part of the context: a block in training is the block that the engine drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.drafters.dflash import DFlash, DFlashConfig, DraftBlock
from sparkdraft.train.corpus import Corpus, CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.drafter_config import grown_config
from sparkdraft.train.fit import Trainer
from sparkdraft.train.settings import FitSettings
from sparkdraft.train.target import load_target
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab
from tests.models.tiny import write_tiny

SIZE, FIRST, LAST, PROMPT, OUTPUT, WIDTH = 16, 16, 48, 60, 100, 8  # first and last are whole blocks of the cache


def drafted(llm: LLM, prompt: list[int]) -> tuple[list[int], dict[int, torch.Tensor]]:
    """What the engine writes, and its drafter's logits by the position of the anchor."""
    proposer, logits = llm.engine.drafting.proposer, dict[int, torch.Tensor]()
    assert proposer and isinstance(proposer.drafter, DFlash)
    whole = proposer.drafter.logits

    def watched(block: DraftBlock) -> torch.Tensor:
        said = whole(block)
        logits[int(block.positions[0])] = said.float().clone()
        return said

    proposer.drafter.logits = watched  # type: ignore[method-assign]
    params = SamplingParams(OUTPUT, num_draft=WIDTH - 1, ignore_eos=True)
    return llm.generate([prompt], params)[0].completions[0].ids, logits


def test_a_block_in_training_sees_what_the_engine_shows_it(tmp_path: Path) -> None:
    name = str(write_tiny(tmp_path / "target", "qwen3"))
    shown = {"draft_sink_size": FIRST, "draft_window_size": LAST}
    drafter = str(write_drafter(tmp_path / "drafter", zlab(body("ff"), inner=shown), random_tensors(body("ff"))))
    prompt = torch.randint(3, 259, (PROMPT,), generator=torch.Generator().manual_seed(8)).tolist()
    llm = LLM(name, drafter=drafter, dtype="float32", threads=1, ngram=False, block_size=SIZE, graphs=False)
    output, served = drafted(llm, prompt)
    with CorpusWriter(tmp_path / "corpus", CorpusInfo(name, 320, ("any",))) as writer:
        writer.add(prompt + output, PROMPT, "any", Finish.LENGTH, 0.0)
    sizes: dict[str, Any] = {"context": PROMPT + OUTPUT, "longest": PROMPT + OUTPUT, "block_rows": WIDTH * (OUTPUT - 1)}
    settings = FitSettings(name, str(tmp_path / "corpus"), drafter, layers=2, block=8, widths=(WIDTH,), **sizes)
    target = load_target(name, "cpu", PROMPT + OUTPUT)
    trainer = Trainer(
        settings, target, Corpus(tmp_path / "corpus"), DFlashConfig.read(grown_config(settings, target.config))
    )
    batch = trainer.batches.take(0)
    assert batch.anchors.tolist() == list(range(PROMPT, PROMPT + OUTPUT - 1)), "every anchor that there is"
    blocks = trainer.block_ids(batch)
    embedding, head = target.decoder.embedding, target.decoder.head.rows()
    assert isinstance(embedding, Tensor) and isinstance(head, Tensor)
    embedded = torch.nn.functional.embedding(blocks.flatten(), embedding)
    with torch.no_grad():
        aux_hidden, _ = trainer.features(batch)
        trainer.model.scale_aux(aux_hidden, keep=True)
        hidden = trainer.model(batch, aux_hidden, embedded).view(*blocks.shape, -1)[:, 1:]
        trained = hidden @ head.t()
    compared = [p for p in served if p < PROMPT + OUTPUT - 1 and len(served[p]) == WIDTH - 1]
    assert len(compared) > 40 and max(compared) > FIRST + LAST + 4 * SIZE
    for position in compared:
        torch.testing.assert_close(trained[position - PROMPT], served[position], rtol=2e-3, atol=2e-3)
