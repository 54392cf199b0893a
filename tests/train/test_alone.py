"""One process trains in a run's folder at a time. (test_corpus.py tests the same of a corpus.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdraft.core import UserError
from sparkdraft.train.corpus import CorpusInfo, CorpusWriter, Finish
from sparkdraft.train.fit import fit
from sparkdraft.train.settings import FitSettings
from tests.models.tiny import write_tiny


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    """Both would replace the same checkpoint."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    target, run = write_tiny(tmp_path / "target", "llama", **shape, num_key_value_heads=1), tmp_path / "run"
    with CorpusWriter(tmp_path / "corpus", CorpusInfo("tiny", 320, ("any",))) as writer:
        writer.add(range(3, 40), 3, "any", Finish.LENGTH, 0.0)
    small = {"layers": 1, "block": 8, "context": 64, "block_rows": 64, "longest": 64}
    settings = FitSettings(target=str(target), data=str(tmp_path / "corpus"), steps=2, **small)  # type: ignore[arg-type]
    refused = list[str]()

    def again() -> bool:
        with pytest.raises(UserError) as second:
            fit(settings, run, "cpu")
        refused.append(str(second.value))
        return False

    assert fit(settings, run, "cpu", stopped=again) == 2
    assert (
        refused
        == [f"Another process is writing to the training run {run}: wait for its end, or name another folder."] * 3
    )
    assert fit(settings, run, "cpu") == 2
