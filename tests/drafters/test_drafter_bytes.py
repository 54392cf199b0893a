"""A drafter with fewer bytes: weights that are quantised at load, and some of the head's rows. Its drafts are what the
same numbers as floats, or the same rows of the whole head, would draft; the target's own matrices stay as they are, the
text is the plain one, the plan counts what is kept, and what cannot be had is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError, Work
from sparkdraft.drafters.base import Drafter
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.load import open_model
from sparkdraft.engine.proposer import Drafts
from sparkdraft.kernels import cuda
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from sparkdraft.weights import loader as loaders
from sparkdraft.weights import quantised_cache
from sparkdraft.weights.linear import Linear
from sparkdraft.weights.loader import Loader
from sparkdraft.weights.quant.quantise import QUANTISERS
from sparkdraft.weights.quant.stored import Coded
from tests.drafters.tiny_assistant import write_assistant
from tests.drafters.tiny_drafter import body, random_tensors, speculators, write_drafter, zlab
from tests.drafters.tiny_mtp import write_target
from tests.models.tiny import TinyOf
from tests.patience import wait_for

GPU = Hardware("cuda", "a GPU", 8, 8 << 30, (9, 0))
PROMPTS = [[(31 * k + 7 * i * i + i) % 250 + 3 for i in range(23)] for k in range(3)]
KINDS = ("dflash", "mtp", "assistant")
IDS = [*range(3, 120, 2), 300]
Files = dict[str, tuple[Path, str]]  # kind -> target, and drafter as the user names it


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_of: TinyOf) -> Files:
    root = tmp_path_factory.mktemp("bytes")
    llama = tiny_of("llama")
    drafter = write_drafter(root / "dflash", zlab(body()), random_tensors(body()))
    hybrid, _ = write_target(root, "qwen3_5")
    gemma = tiny_of("gemma4")
    assistant = write_assistant(root / "assistant")
    tied = tiny_of("qwen3-tied")
    return {
        "tied": (tied, str(drafter)),
        "dflash": (llama, str(drafter)),
        "mtp": (hybrid, "mtp"),
        "assistant": (gemma, str(assistant)),
    }


@pytest.fixture(autouse=True)
def no_steps_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take most of the time, and depths are fixed here."""
    monkeypatch.setattr(Engine, "warm_up", lambda engine: None)


def load(pair: tuple[Path, str], **options: Any) -> LLM:
    given = {"dtype": "float32", "ngram": False, "threads": 1, "drafter": pair[1], "max_seqs": 3, "spec": "3"}
    given |= {"weights_cache": False}
    return LLM(str(pair[0]), device="cpu", **given | options)


def drafter_of(llm: LLM) -> Drafter:
    proposer = llm.engine.drafting.proposer
    assert proposer
    return proposer.drafter


def numbers(matrices: Any) -> list[Tensor]:
    return [each.linear(torch.eye(each.tiles.shape[1])).t() for each in matrices if isinstance(each, Linear)]


def texts(llm: LLM, depth: int, **options: Any) -> list[list[int]]:
    params = SamplingParams(16, num_draft=depth, ignore_eos=True, **options)
    return [list(each.completions[0].ids) for each in llm.generate(PROMPTS, params)]


def ids_file(folder: Path, ids: list[int] = IDS) -> str:
    path = folder / "ids.txt"
    path.write_text("".join(f"{each} 7\n" for each in reversed(ids)))
    return str(path)


# ---- weights that are quantised at load


def rounded(form: str, name: str, tensor: Tensor) -> Tensor:
    return QUANTISERS[form][0](tensor).dequantize() if tensor.dim() == 2 and "norm" not in name else tensor


@pytest.mark.parametrize("form", QUANTISERS)
def test_a_quantised_drafter_is_one_whose_file_holds_the_rounded_numbers(
    form: str, files: Files, tmp_path: Path
) -> None:
    target, drafter = files["dflash"]
    exact = {name: rounded(form, name, tensor) for name, tensor in load_file(f"{drafter}/model.safetensors").items()}
    folder = write_drafter(tmp_path / "rounded", zlab(body()), exact)
    made, expected = load((target, drafter), drafter_weights=form), load((target, str(folder)))
    pairs = zip(numbers(drafter_of(made).matrices), numbers(drafter_of(expected).matrices), strict=True)
    assert all(torch.equal(own, theirs) for own, theirs in pairs)
    assert texts(made, 3) == texts(made, 0)
    counts = [llm.engine.drafting.total.as_dict()["num_draft_tokens"] for llm in (made, expected)]
    assert counts[0] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_target_and_drafter_have_formats_of_their_own(kind: str, files: Files) -> None:
    plain, target, drafter = (
        load(files[kind], **each) for each in ({}, {"weights": "int4"}, {"drafter_weights": "int4"})
    )

    def same(a: LLM, b: LLM, of: Callable[[LLM], Any]) -> bool:
        return all(map(torch.equal, numbers(of(a)), numbers(of(b))))

    def layers(llm: LLM) -> list[Any]:
        return [matrix for layer in llm.engine.runner.model.layers for matrix in layer.matrices]

    assert same(plain, drafter, layers) and not same(plain, target, layers)
    assert same(plain, target, lambda llm: drafter_of(llm).matrices[:-1])  # the last is the head, perhaps the target's
    assert not same(plain, drafter, lambda llm: drafter_of(llm).matrices)
    assert texts(drafter, 3) == texts(plain, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_the_plan_counts_what_a_gpu_keeps(kind: str, form: str, files: Files) -> None:
    """The drafter is built of the matrices that a GPU's kernels keep, over a target as a CPU keeps it."""
    target, name = files[kind]
    opened = open_model(EngineConfig.of(model=str(target), drafter=name, drafter_weights=form))
    source, caps, llm = opened.drafter, opened.caps, load(files[kind])
    assert source and caps and caps.stored
    own = Loader(source.source, torch.device("cpu"), torch.float32, cuda, weights=form)
    kv = getattr(drafter_of(llm), "kv", None)  # an assistant has none
    made = source.build(own, cuda, llm.engine.runner.model, kv, 64, 1)  # type: ignore[arg-type]
    held = [each for each in _all_matrices(made) if each is not llm.engine.runner.model.head]
    coded, floats = ([m.nbytes for m in held if bool(m.tiles.layout) == is_coded] for is_coded in (True, False))
    assert coded and sum(coded) == caps.stored.quantised
    assert sum(floats) == 4 * caps.stored.floats
    plans = [
        resolve(EngineConfig(), opened.model_config, GPU, drafter=each, stored=opened.checkpoint.stored_bytes())
        for each in (caps, open_model(EngineConfig.of(model=str(target), drafter=name)).caps)
    ]
    saved = plans[1].memory.weights - plans[0].memory.weights
    assert saved == 2 * caps.num_weights - caps.stored.kept(2) > 0


def _all_matrices(drafter: Any) -> list[Any]:
    """With experts and routers, which `matrices` leaves out."""
    layers = drafter.layers if hasattr(drafter, "layers") else [drafter.layer]
    inside = [matrix for layer in layers for matrix in layer.matrices]
    return [*inside, *(each for each in drafter.matrices if all(each is not m for m in inside))]


def test_what_was_quantised_is_kept_apart_from_the_targets(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head in the target's own file, quantised as the target is: two folders, and the next load rounds nothing."""
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "cache"))
    both = {"weights": "fp8", "drafter_weights": "fp8", "weights_cache": True}
    first = load(files["mtp"], **both)
    entries = [entry.path.name for entry in quantised_cache.entries()]
    assert len(entries) == 2 and sum("-drafter-" in name for name in entries) == 1

    def quantise(weight: Tensor) -> Coded:
        raise AssertionError("quantised again")

    monkeypatch.setitem(loaders.QUANTISERS, "fp8", (quantise, 1))
    second = load(files["mtp"], **both)
    assert second.fallbacks() == first.fallbacks()
    pairs = zip(numbers(drafter_of(first).matrices), numbers(drafter_of(second).matrices), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_rows_of_the_targets_head_are_never_taken_from_the_cache(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKDRAFT_CACHE", str(tmp_path / "cache"))
    options = {"drafter_weights": "fp8", "weights_cache": True}
    made = [load(files["dflash"], **options, draft_vocab=ids_file(tmp_path, ids)) for ids in (IDS, IDS[::-1][:9])]
    for llm, ids in zip(made, (IDS, sorted(IDS[::-1][:9])), strict=True):
        (head,) = numbers([drafter_of(llm).matrices[-1]])
        whole = llm.engine.runner.model.head.rows(torch.tensor(ids))
        assert torch.equal(head, QUANTISERS["fp8"][0](whole).dequantize())


def test_what_cannot_be_quantised_is_refused(files: Files) -> None:
    with pytest.raises(UserError, match=r"drafter_weights is fp8, and .*smollm2-dflash has no matrix of floats"):
        LLM("smollm2", device="cpu", drafter_weights="fp8", weights_cache=False)  # its 8 bits stay what they are
    with pytest.raises(UserError, match=r"drafter_weights is int4, and there is no drafter: name one"):
        load((files["dflash"][0], "none"), drafter_weights="int4")
    with pytest.raises(UserError, match=r"drafter_weights is 'int3'; it must be one of auto, fp8"):
        EngineConfig(drafter_weights="int3")
    assert load((files["dflash"][0], "none"), drafter_weights="int4", spec="off")


# ---- some of the ids


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("tied", "quantised"), ("assistant", "quantised")]
)
def test_only_ids_of_the_file_are_drafted_and_the_text_stays(
    kind: str, dtype: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = load(files[kind], draft_vocab=ids_file(tmp_path), dtype=dtype)
    whole = load(files[kind], dtype=dtype)
    seen: list[int] = []
    proposer = few.engine.drafting.proposer
    assert proposer
    propose = proposer.propose

    def watched(works: list[Work]) -> list[Drafts]:
        made = propose(works)
        seen.extend(each for drafts in made for each in drafts.ids)
        return made

    monkeypatch.setattr(proposer, "propose", watched)
    assert texts(few, 3) == texts(whole, 0)
    assert texts(few, 3, temperature=0.8, seed=3) == texts(whole, 0, temperature=0.8, seed=3)
    assert seen and set(seen) <= set(IDS)
    assert drafter_of(few).caps.num_ids == len(IDS)
    said = {fact.name: fact.value for fact in few.facts()}
    assert f"drafts among {len(IDS)} of {few.model_config.vocab_size} ids" in said["drafter's weights"]
    if dtype == "float32":
        mine, all_rows = (numbers([drafter_of(llm).matrices[-1]])[0] for llm in (few, whole))
        assert torch.equal(mine, all_rows[IDS])


def test_a_file_may_replace_the_ids_of_the_drafters_own_file(files: Files, tmp_path: Path) -> None:
    tensors = random_tensors(body()) | {"d2t": torch.arange(100)}
    folder = write_drafter(tmp_path / "d", speculators(body(), draft_vocab_size=100), tensors)
    pair = (files["dflash"][0], str(folder))
    assert drafter_of(load(pair)).caps.num_ids == 100
    assert drafter_of(load(pair, draft_vocab=ids_file(tmp_path))).ends.ids.tolist() == IDS  # type: ignore[attr-defined]
    whole = load(pair, draft_vocab=ids_file(tmp_path, [*range(320)]))
    assert drafter_of(whole).caps.num_ids == 0 and drafter_of(whole).ends.ids is None  # type: ignore[attr-defined]
    assert texts(whole, 3) == texts(whole, 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no ids"),
        ("3\nfour\n", "is no file of ids"),
        ("[1, 2.5]", "is no file of ids"),
        ("[1, 2", "is no file of ids"),
        ("5\n320\n", "holds the id 320; the model's go from 0 to 319"),
        ("-1\n", "holds the id -1"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(text: str, why: str, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    with pytest.raises(UserError, match=why):
        open_model(EngineConfig.of(model=str(files["dflash"][0]), drafter=files["dflash"][1], draft_vocab=str(path)))


def test_a_head_that_cannot_be_cut_is_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rows of the model's head cannot be taken out of its format"):
        load(files["dflash"], dtype="quantised", draft_vocab=ids_file(tmp_path))  # not tied, and packed by the kernels
    tensors = random_tensors(body()) | {"lm_head.weight": torch.zeros(100, 96), "d2t": torch.arange(100)}
    folder = write_drafter(tmp_path / "d", speculators(body(), draft_vocab_size=100), tensors)
    own_head = EngineConfig.of(model=str(files["dflash"][0]), drafter=str(folder), draft_vocab=ids_file(tmp_path))
    with pytest.raises(UserError, match="brings a head of its own, of 100 ids"):
        open_model(own_head)
    with pytest.raises(UserError, match=r"draft_vocab is missing\.txt, which cannot be read: No such file"):
        open_model(EngineConfig.of(model=str(files["mtp"][0]), drafter="mtp", draft_vocab="missing.txt"))


# ---- ids that are counted


def test_ids_are_counted_over_runs_and_the_first_lines_are_ids_to_draft(files: Files, tmp_path: Path) -> None:
    path, written = tmp_path / "counts", list[int]()
    for _ in range(2):
        llm = load(files["dflash"], count_ids=str(path))
        llm.engine.reset_counts()
        written += [each for text in texts(llm, 3) for each in text]
        assert llm.engine._counts
        llm.engine._counts.flush()
    rows = [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
    assert dict(rows) == {each: written.count(each) for each in set(written)}
    assert [count for _, count in rows] == sorted((count for _, count in rows), reverse=True)
    few = tmp_path / "few"
    few.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    assert drafter_of(load(files["dflash"], draft_vocab=str(few))).caps.num_ids == 5


def test_ids_that_were_not_a_users_are_forgotten_and_a_list_counts_once(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_text(json.dumps([5, 9]))
    llm = load(files["dflash"], count_ids=str(path))
    texts(llm, 0)
    llm.engine.reset_counts()
    assert llm.engine._counts
    llm.engine._counts.flush()
    assert path.read_text() == "5 1\n9 1\n"
    with pytest.raises(UserError, match="which cannot be written: No such file"):
        load(files["dflash"], count_ids=str(tmp_path / "no" / "such"))


def test_what_is_counted_is_written_after_a_while(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's process is ended without a word."""
    from sparkdraft.drafters import vocabulary

    monkeypatch.setattr(vocabulary, "WRITE_AFTER", 0.01)
    counts = vocabulary.IdCounts(str(tmp_path / "counts"), 10)
    counts.add([3, 3, 4])
    assert wait_for((tmp_path / "counts").read_text) == "3 2\n4 1\n"
