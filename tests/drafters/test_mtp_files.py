"""MTP heads in files: their forms, what is refused and in which words, which drafter is chosen, what is counted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants as hf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkdraft import LLM, SamplingParams
from sparkdraft.cli.models import find_published
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.drafters import pairs
from sparkdraft.drafters.find import Choice, DraftSource, choose
from sparkdraft.drafters.mtp import MtpConfig, MtpHead
from sparkdraft.engine.engine import Engine
from sparkdraft.models.common.sizes import kv_bytes_per_token
from sparkdraft.models.registry import read_config
from sparkdraft.operate.bench.shapes import TARGET_FILES, shape
from sparkdraft.plan.hardware import Hardware
from sparkdraft.plan.resolve import resolve
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.plane_layout import StoredBytes
from sparkdraft.weights.quant.stored import as_float
from tests.drafters.test_pairs import put
from tests.drafters.tiny_drafter import body
from tests.drafters.tiny_mtp import add_tensors, tensors_of, write_target
from tests.models.recurrent import load, texts
from tests.models.test_quantised import FORMS
from tests.models.tiny import SMALL, write_tiny

PROMPT = [(7 * i * i + 31 * i) % 250 + 3 for i in range(21)]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("dense") / "tiny-dense", "qwen3_5")[0]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("experts") / "tiny-experts", "qwen3_5_moe")[0]


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "warm_up", lambda self: None)  # which only measures


def changed(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a checkpoint, with other tensors of the head."""
    shutil.copytree(source, target)
    return add_tensors(target, change(tensors_of(source)))


def head_of(llm: LLM) -> MtpHead:
    proposer = llm.engine.drafting.proposer
    assert proposer and isinstance(proposer.drafter, MtpHead)
    return proposer.drafter


def drafts(folder: Path, **options: object) -> list[list[int]]:
    """What a head drafts over a short text, step by step."""
    llm, found = load(folder, **{"drafter": "mtp", "spec": "3", "dtype": "float32", **options}), list[list[int]]()
    propose = head_of(llm).propose

    def spy(*args: object) -> Tensor:
        ids = propose(*args)  # type: ignore[arg-type]
        found.extend(ids.tolist())
        return ids

    head_of(llm).propose = spy  # type: ignore[method-assign,assignment]
    llm.generate([PROMPT], SamplingParams(8, ignore_eos=True))
    return found


# ---- forms


def single(tensors: Tensors) -> Tensors:
    """Experts one by one, as quantised files have them."""
    name = "mtp.layers.0.mlp.experts"
    out = {key: value for key, value in tensors.items() if not key.startswith(name)}
    for e, (both, down) in enumerate(zip(tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"], strict=True)):
        gate, up = both.chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        out |= {f"{name}.{e}.{part}.weight": matrix.clone() for part, matrix in parts.items()}
    return out


def renamed(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", [single, renamed])
def test_forms_of_one_head_draft_the_same(experts: Path, tmp_path: Path, form: Callable[[Tensors], Tensors]) -> None:
    assert drafts(changed(experts, tmp_path / "other", form)) == drafts(experts)


def test_tables_of_its_own_are_used(dense: Path, tmp_path: Path) -> None:
    """With tables of other ids, the same states lead to other drafts; those of the target come last."""
    order = torch.randperm(SMALL["vocab_size"], generator=torch.Generator().manual_seed(1))
    target = open_checkpoint(str(dense))
    table, head = (target.read(n) for n in ("model.language_model.embed_tokens.weight", "lm_head.weight"))
    assert isinstance(table, Tensor) and isinstance(head, Tensor)
    same = changed(dense, tmp_path / "a", lambda t: t | {"mtp.embed_tokens.weight": table, "mtp.lm_head.weight": head})
    turned = changed(dense, tmp_path / "b", lambda t: t | {"mtp.lm_head.weight": head[order]})
    other = changed(dense, tmp_path / "c", lambda t: t | {"mtp.embed_tokens.weight": table[order]})
    plain = drafts(dense)
    assert drafts(same) == plain and drafts(other) != plain
    where = order.argsort()
    assert [step[0] for step in drafts(turned)] == [int(where[step[0]]) for step in plain]


def coded(form: str, prefix: str) -> Callable[[Tensors], Tensors]:
    """The matrices under a prefix in a quantised format."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            chosen = name.startswith(prefix) and name.endswith(("_proj.weight", "fc.weight"))
            found |= FORMS[form](name, tensor) if chosen else {name: tensor}
        return found

    return change


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_a_quantised_head_drafts_what_its_numbers_say(dense: Path, tmp_path: Path, form: str) -> None:
    """In a file of floats: a head's format is its own."""
    small = changed(dense, tmp_path / "coded", coded(form, "mtp."))
    source = open_checkpoint(str(small))
    same = changed(dense, tmp_path / "floats", lambda tensors: {n: as_float(source.read(n)) for n in tensors})
    assert not isinstance(source.read("mtp.fc.weight"), Tensor)
    assert drafts(small) == drafts(same)
    assert form != "nvfp4" or drafts(small) != drafts(dense), "4 bits are few enough to see that they were read"
    params = SamplingParams(16, ignore_eos=True)
    assert texts(load(small, drafter="mtp", spec="3"), [PROMPT], params) == texts(load(dense), [PROMPT], params)


def test_a_head_of_floats_stays_so_in_a_quantised_file(dense: Path, tmp_path: Path) -> None:
    """As in published NVFP4 files. The target writes another text, which drafts do not change."""
    shutil.copytree(dense, tmp_path / "coded")
    small, whole = tmp_path / "coded", dict[str, Tensor]()
    for shard in dense.glob("*.safetensors"):
        whole |= load_file(shard)
        (small / shard.name).unlink()
    (small / "model.safetensors.index.json").unlink()
    save_file(coded("nvfp4", "model.language_model.layers.")(whole), small / "model.safetensors")
    llm, params = load(small, drafter="mtp", spec="3", dtype="float32"), SamplingParams(16, ignore_eos=True)
    assert isinstance(open_checkpoint(str(small)).read("mtp.layers.0.mlp.up_proj.weight"), Tensor)
    assert texts(llm, [PROMPT], params) == texts(load(small, dtype="float32"), [PROMPT], params)
    kept = head_of(llm).layer.matrices[0]
    assert kept.nbytes == head_of(load(dense, drafter="mtp", spec="3", dtype="float32")).layer.matrices[0].nbytes


def test_the_head_of_another_file_drafts(dense: Path, tmp_path: Path) -> None:
    """Quantised copies often lose their head; the original's is named by its folder."""
    bare = write_tiny(tmp_path / "bare", "qwen3_5")
    assert drafts(bare, drafter=str(dense)) == drafts(dense)
    wider = write_tiny(tmp_path / "wider", "qwen3_5", hidden_size=96)
    with pytest.raises(UserError, match=r"does not fit the model: it has hidden size 64 and 320 ids, the model 96"):
        load(wider, drafter=str(dense), spec="auto")


# ---- heads that are not whole


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def narrow(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensors[name][..., :-1].contiguous()}


def second_layer(tensors: Tensors) -> Tensors:
    return tensors | {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items()}


def strange(tensors: Tensors) -> Tensors:
    return tensors | {"mtp.extra.weight": torch.zeros(3)}


BROKEN = [
    (
        without("mtp.fc.weight"),
        r"The MTP head in .* is incomplete, mtp\.fc\.weight is missing: use the model's original",
    ),
    (
        without("mtp.norm.weight", "mtp.layers.0.self_attn.k_norm.weight"),
        r"incomplete, mtp\.norm\.weight is missing and 1 more: .*--drafter none",
    ),
    (narrow("mtp.fc.weight"), r"--drafter none goes without: .*mtp\.fc\.weight has shape \(64, 127\), .* \(64, 128\)"),
    (narrow("mtp.norm.weight"), r"mtp\.norm\.weight has shape \(63,\), the config says \(64,\)"),
    (second_layer, r"has 2 layers, and heads of one layer are read: .*--drafter none"),
    (strange, r"1 tensors belong to no part of the model: mtp\.extra\.weight"),
]


@pytest.mark.parametrize(("change", "said"), BROKEN)
def test_a_head_that_is_not_whole_is_refused(
    dense: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], said: str
) -> None:
    broken = changed(dense, tmp_path / "broken", change)
    with pytest.raises(UserError, match=said) as error:
        load(broken, drafter="mtp", spec="auto")
    assert "\n" not in str(error.value)


def test_a_missing_expert_is_named(experts: Path, tmp_path: Path) -> None:
    broken = changed(experts, tmp_path / "a", lambda t: without("mtp.layers.0.mlp.experts.5.up_proj.weight")(single(t)))
    with pytest.raises(UserError, match=r"tensor mtp\.layers\.0\.mlp\.experts\.5\.up_proj\.weight is missing"):
        load(broken, drafter="mtp", spec="auto")


def test_a_model_without_a_head_says_so(tmp_path: Path) -> None:
    bare, other = write_tiny(tmp_path / "a", "qwen3_5"), write_tiny(tmp_path / "b", "qwen3")
    with pytest.raises(UserError, match=r"has no MTP head \(no tensors mtp\.\*\): use the model's original file"):
        load(bare, drafter="mtp", spec="auto")
    with pytest.raises(UserError, match=r"A qwen3 model has no MTP head that is read: .* leave --drafter out"):
        load(other, drafter="mtp", spec="auto")


# ---- which drafter is chosen


def chosen(folder: Path) -> Choice[DraftSource]:
    checkpoint = open_checkpoint(str(folder))
    return choose(str(folder), read_config(checkpoint.config), checkpoint)


def test_a_head_is_found_by_itself(dense: Path) -> None:
    llm = load(dense, spec="auto")
    assert head_of(llm).caps.name == "mtp"
    (note,) = [f for f in llm.fallbacks() if "drafting with" in f.name]
    assert note.name == "drafting with the MTP head in the model's own file"
    assert note.reason == "it is there; --drafter none goes without"
    assert not load(dense, spec="auto", drafter="none").engine.drafting.proposer
    assert not [f for f in load(dense, spec="off").fallbacks() if "draft" in f.name]


def test_a_head_that_is_not_whole_is_passed_over(dense: Path, tmp_path: Path) -> None:
    drafter, (note,), _ = chosen(changed(dense, tmp_path / "broken", without("mtp.fc.weight")))
    assert drafter is None and note.name == "the MTP head in the model's file is passed over"
    assert "mtp.fc.weight is missing" in note.reason


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, and a table in which the tiny model has a drafter and a head."""
    dflash = pairs.KnownDrafter(
        "z-lab/Tiny-DFlash", "dflash", "z-lab", 8, 2, (0, 2), 0, 0.01, "off", 512, (3.5,), "a test's figure"
    )
    head = pairs.KnownDrafter("", "mtp", "own file", 5, 1, (), 0, None, "any", None, (4.5,), "another figure")
    ends = SMALL["hidden_size"], SMALL["vocab_size"]
    target = pairs.KnownTarget("someone/Tiny-Dense", "qwen3_5", 4, *ends, (head, dflash))
    monkeypatch.setattr(pairs, "targets", lambda: (target,))
    monkeypatch.setattr(hf, "HF_HUB_CACHE", str(tmp_path))
    yield tmp_path


def test_dflash_is_preferred_and_the_head_is_named(dense: Path, cache: Path) -> None:
    """Whatever the figures say: they are others' and of different prompts."""
    drafter, (note,), _ = chosen(dense)
    assert drafter and drafter.caps.name == "mtp" and "4.5 tokens per step (another figure)" in note.reason
    assert "no other drafter is in the hub's cache: `sparkdraft pull z-lab/Tiny-DFlash` fetches" in note.reason
    put(cache, "z-lab/Tiny-DFlash", body("ff", hidden_size=64, num_attention_heads=2))
    config = json.loads((next(cache.rglob("config.json"))).read_text())
    (next(cache.rglob("config.json"))).write_text(json.dumps(config | {"num_target_layers": 4}))
    drafter, (note,), _ = chosen(dense)
    assert drafter and drafter.caps.name == "dflash" and note.name == "drafting with z-lab/Tiny-DFlash"
    assert "--drafter mtp takes the MTP head in the model's own file; --drafter none goes without" in note.reason
    assert head_of(load(dense, drafter="mtp", spec="auto"))


def test_tables_say_where_heads_are_read() -> None:
    for target in pairs.targets():
        kinds = [d.kind for d in target.readable]
        assert kinds == sorted(kinds, key=pairs.ORDER.index), "DFlash comes first, whatever the figures are"
        assert all(d.repo for d in target.published) and {"mtp"} >= {d.kind for d in target.readable if not d.repo}


def test_a_head_needs_no_fetching(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sparkdraft.cli.models.read_config_json", lambda repo: TARGET_FILES["qwen3.5-27b"])
    assert find_published("Qwen/Qwen3.8-27B") == ""
    assert "Qwen/Qwen3.8-27B is an MTP head in the model's own file" in capsys.readouterr().err
    assert find_published("Qwen/Qwen3.5-27B") == "z-lab/Qwen3.5-27B-DFlash"


# ---- what is counted


@pytest.mark.parametrize("variant", ["dense", "experts"])
def test_the_plan_counts_a_head(variant: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(variant)
    llm, plain = load(folder, drafter="mtp", spec="3", dtype="float32"), load(folder, dtype="float32")
    head = head_of(llm)
    matrices = [head.join.fc, head.context_kv, *head.layer.matrices]
    assert 4 * head.caps.num_weights == sum(matrix.nbytes for matrix in matrices)
    assert llm.plan.memory.weights - plain.plan.memory.weights == 4 * head.caps.num_weights
    per_block = [plan.memory.kv // plan.num_blocks for plan in (llm.plan, plain.plan)]
    assert per_block[0] - per_block[1] == kv_bytes_per_token(head.caps.kv, 4) * llm.plan.block_size
    one, three = head.reads(1), head.reads(3)
    assert three.propose == 3 * one.propose and three.observe == one.observe > 0
    assert one.propose == 4 * (head.caps.num_read + 320 * 64)


def test_what_a_quantised_file_holds_is_counted_once() -> None:
    """A GPU keeps what is stored, and a head that is stored there too is a part of it."""
    model, stored = shape("qwen3.5-27b"), StoredBytes(quantised=27 << 30, floats=2 << 30)
    gpu, config = Hardware("cuda", "", 8, 128 << 30, (9, 0)), EngineConfig(max_model_len=4096, max_seqs=1)

    def weights(head: MtpConfig | None) -> int:
        return resolve(config, model, gpu, None, head.caps() if head else None, stored).memory.weights

    inside, beside = MtpConfig.of(model), MtpConfig.of(model, in_target=False)
    again = 2 * inside.attention.kv_width * model.hidden_size  # keys and values a second time are in no file
    assert weights(inside) == weights(None) + 2 * again
    some = replace(inside, draft_vocab_size=4096)  # nor are rows of the target's head, which are a matrix of their own
    assert weights(some) == weights(inside) + 2 * 4096 * model.hidden_size
    assert weights(beside) - weights(None) == 2 * beside.caps().num_weights


def test_names_and_shapes_are_the_files(dense: Path, experts: Path) -> None:
    """The table that random weights are made from, and what is missing is found by."""
    for folder in (dense, experts):
        config = MtpConfig.of(read_config(open_checkpoint(str(folder)).config))
        assert config.tensor_shapes() == {name: tuple(t.shape) for name, t in tensors_of(folder).items()}
        own = MtpConfig(config.model, own_embedding=True, own_head=True).caps()
        assert own.num_weights - config.caps().num_weights == 2 * 320 * 64


def test_facts_tell_of_passes(dense: Path) -> None:
    (fact,) = [f for f in load(dense, drafter="mtp", spec="3").facts() if f.name == "the drafter's passes"]
    assert re.match(r"mtp, one per draft, up to 6 per step; one graph, replayed for each", fact.value)
