"""Exported drafters, loaded again: by z-lab's package, by our reader in both dialects, as integers bit for bit; whole
folders or none."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.drafters.base import SeenContext
from sparkdraft.drafters.dflash import DFlashConfig
from sparkdraft.drafters.find import default_drafter, open_drafter
from sparkdraft.kernels import native
from sparkdraft.train.export import ExportTarget, export, speculators_config
from sparkdraft.train.target import head_rows
from sparkdraft.weights.quant.stored import Coded, GroupQuant
from sparkdraft.weights.safetensors import INDEX
from tests.drafters.tiny_drafter import DraftHarness, body, random_tensors, write_drafter, zlab
from tests.models.harness import Harness
from tests.models.tiny import oracle, write_tiny

CONFIG, TENSORS = zlab(body("ff")), random_tensors(body("ff"))
TARGET = ExportTarget("org/tiny", ("LlamaForCausalLM",))
ANCHORS = range(7, 15)


def write(folder: Path, layout: str = "zlab", **options: Any) -> Path:
    export(options.pop("config", CONFIG), TENSORS, folder, layout, target=TARGET, **options)
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def features(target: Path, kernel: str = "reference") -> tuple[Harness, Tensor]:
    harness = Harness(target, kernel)
    ids = torch.randint(3, 259, (30,), generator=torch.Generator().manual_seed(4)).tolist()
    return harness, harness.run({"a": ids}, (0, 2))[1]


def drafted(folder: Path, target: Path, kernel: str = "reference") -> Tensor:
    """Logits of a block after each of a few anchors, [anchors, 7, vocabulary]."""
    harness, aux_hidden = features(target, kernel)
    drafts = DraftHarness(harness.model, folder, kernel)
    drafts.observe({"a": aux_hidden})
    return torch.stack([drafts.propose({"a": anchor})["a"] for anchor in ANCHORS])


# ---- layouts


@pytest.mark.parametrize("bits", [16, 8])
def test_a_smaller_vocabulary_takes_its_rows_of_the_targets_head(tiny: Path, tmp_path: Path, bits: int) -> None:
    ids = torch.arange(3, 259, 2)
    whole = drafted(write(tmp_path / "whole", bits=bits), tiny)
    fewer = drafted(write(tmp_path / "fewer", bits=bits, vocabulary=ids), tiny)
    assert torch.equal(fewer, whole[..., ids])
    with pytest.raises(UserError, match="give the target's rows"):
        write(tmp_path / "other", "speculators", vocabulary=ids)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("variant", ["llama", "qwen3-tied"])
def test_speculators_keeps_the_rows_itself_and_drafts_the_same(tmp_path: Path, variant: str, bits: int) -> None:
    whole = write_tiny(tmp_path / "whole", variant)
    target = tmp_path / "target"  # a head in 16 bits, as targets are published: nothing is lost on the way
    oracle(whole).bfloat16().save_pretrained(target)
    oracle.cache_clear()
    shutil.copy(whole / "tokenizer.json", target)
    ids = torch.arange(3, 259, 2)
    head = head_rows(str(target), ids, DFlashConfig.read(CONFIG))
    one = write(tmp_path / "one", bits=bits, vocabulary=ids)
    other = write(tmp_path / "other", "speculators", bits=bits, vocabulary=ids, head=head)
    assert torch.equal(drafted(one, target), drafted(other, target))
    source = open_drafter(str(other))
    assert set(source.names()) == {*TENSORS, "lm_head.weight", "d2t", "t2d"}
    kept, offsets, rows = (source.read(name) for name in ("t2d", "d2t", "lm_head.weight"))
    assert isinstance(kept, Tensor) and isinstance(offsets, Tensor) and isinstance(rows, Tensor)
    assert (kept.dtype, kept.shape) == (torch.bool, (320,)) and kept.nonzero().flatten().tolist() == ids.tolist()
    assert offsets.dtype == torch.int64 and (offsets + torch.arange(len(ids))).tolist() == ids.tolist()
    assert torch.equal(rows, head) and source.config["draft_vocab_size"] == len(ids)
    assert "draft_vocab_size" not in source.config["transformer_layer_config"]
    assert source.config["transformer_layer_config"]["vocab_size"] == 320


@pytest.mark.parametrize("shard_bytes", [15 * 2**20, 30_000], ids=["one-file", "shards"])
def test_zlabs_package_loads_its_layout_and_drafts_the_same(tiny: Path, tmp_path: Path, shard_bytes: int) -> None:
    dflash = pytest.importorskip("dflash.model", reason="pip install --no-deps dflash==0.1.0")
    folder = write(tmp_path / "d", shard_bytes=shard_bytes)
    model = dflash.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    _, aux_hidden = features(tiny)
    ids = torch.tensor([[ANCHORS[0]] + [model.mask_token_id] * 7])
    with torch.inference_mode():
        embedded = dflash._raw_input_embeddings(oracle(tiny), ids, 1.0)
        hidden = model(
            position_ids=torch.arange(38)[None], noise_embedding=embedded, target_hidden=aux_hidden.flatten(1)[None]
        )
        wanted = model.compute_logits(hidden[:, 1:], oracle(tiny).lm_head)[0]
    got = drafted(folder, tiny)[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_tensors_and_taps_come_back(tmp_path: Path, layout: str) -> None:
    source = open_drafter(str(write(tmp_path / "d", layout)))
    assert set(source.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read = source.read(name)
        assert isinstance(read, Tensor) and torch.equal(read, tensor.to(torch.bfloat16))
    draft, ours = DFlashConfig.read(source.config), DFlashConfig.read(CONFIG)
    assert draft.aux_layers == (0, 2) and draft.model == ours.model


def test_what_speculators_says(tmp_path: Path) -> None:
    config = json.loads((write(tmp_path / "d", "speculators") / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3] and config["speculators_model_type"] == "dflash"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert "dflash_config" not in config["transformer_layer_config"] and config["draft_vocab_size"] == 320


@pytest.mark.parametrize(
    "config",
    [
        zlab(body("ssf", window=6)),
        zlab(body("sss", window=5), is_causal=False),
        zlab(body("fff"), inner={"use_swa": True, "swa_window_size": 5}),
        zlab(body("ff", rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0})),
        zlab(body("ff"), inner={"draft_sink_size": 5, "draft_window_size": 40}),
    ],
    ids=["mixed", "open", "forced", "yarn", "shown"],
)
def test_masks_and_rotations_survive_the_other_dialect(tmp_path: Path, config: dict[str, Any]) -> None:
    source = open_drafter(str(write(tmp_path / "d", "speculators", config=config)))
    draft, ours = DFlashConfig.read(source.config), DFlashConfig.read(config)
    assert (draft.model, draft.aux_layers, draft.sees) == (ours.model, ours.aux_layers, ours.sees)


@pytest.mark.parametrize("config", [zlab(body(), is_causal=True), zlab(body(), inner={"output_multiplier": 0.5})])
def test_what_speculators_cannot_say_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="export it as zlab"):
        write(tmp_path / "d", "speculators", config=config)
    assert files(tmp_path) == []


def test_how_much_a_drafter_is_shown_is_kept_and_noted_where_others_ignore_it(tmp_path: Path) -> None:
    """The embedded drafter is such a one, and vLLM shall draft with it."""
    embedded = default_drafter("smollm2")
    assert embedded
    config = json.loads((Path(embedded) / "config.json").read_text())
    assert speculators_config(config, TARGET)["draft_vocab_size"] == config["draft_vocab_size"]
    config = zlab(body(), inner={"draft_sink_size": 4, "draft_window_size": 16})
    assert export(config, TENSORS, tmp_path / "own", "zlab") == ""
    note = export(config, TENSORS, tmp_path / "other", "speculators", target=TARGET)
    assert "the first 4 and the last 16 tokens" in note and "past 20 fewer drafts" in note
    read = DFlashConfig.read(open_drafter(str(tmp_path / "other")).config)
    assert read.sees == SeenContext(4, 16) and read.model == DFlashConfig.read(config).model


# ---- 8 bits


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_integers_come_back_bit_for_bit(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "d", layout, bits=8, shard_bytes=30_000)
    source = open_drafter(str(folder))
    assert set(source.names()) == set(TENSORS)  # the scales do not show
    for name, tensor in TENSORS.items():
        read = source.read(name)
        if tensor.dim() == 1:
            assert isinstance(read, Tensor) and torch.equal(read, tensor.to(torch.bfloat16))
            continue
        wanted = GroupQuant.from_float(tensor)
        assert isinstance(read, Coded) and read.scale is not None and read.group == 32 and read.offset is None
        assert torch.equal(read.codes.view(torch.int8), wanted.q.flatten(1)) and torch.equal(read.scale, wanted.scale)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "int-quantized")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size < 0.65 * sum(path.stat().st_size for path in write(tmp_path / "h").glob("*.safetensors"))


def test_a_width_that_has_no_groups_stays_in_16_bits(tmp_path: Path) -> None:
    tensors = {name: t[:, :-1] if name == "fc.weight" else t for name, t in TENSORS.items()}
    export(CONFIG, tensors, tmp_path / "d", "zlab", bits=8)
    source = open_drafter(str(tmp_path / "d"))
    value = source.read("fc.weight")
    assert isinstance(value, Tensor) and value.dtype == torch.bfloat16
    assert "fc" in source.config["quantization_config"]["ignore"]


@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_8_bits_draft_like_16(tiny: Path, tmp_path: Path, kernel: str) -> None:
    if kernel == "native" and native.unavailable_reason():
        pytest.skip(str(native.unavailable_reason()))
    full, small = (drafted(write(tmp_path / str(bits), bits=bits), tiny, kernel) for bits in (16, 8))
    assert torch.cosine_similarity(full, small, dim=-1).min() > 0.99
    same = full.argmax(-1) == small.argmax(-1)  # a random drafter's best two are often close
    assert same.float().mean() >= 0.9, f"{int(same.sum())} of {same.numel()}"


def test_packed_kernels_use_the_integers_as_they_are(tiny: Path, tmp_path: Path) -> None:
    """Float weights that are rounded at load draft the same bits as the export, where integers are just read."""
    if native.unavailable_reason():
        pytest.skip(str(native.unavailable_reason()))
    floats = {name: t if t.dim() == 2 else t.to(torch.bfloat16) for name, t in TENSORS.items()}
    rounded_at_load = drafted(write_drafter(tmp_path / "floats", CONFIG, floats), tiny, "native")
    assert torch.equal(drafted(write(tmp_path / "d", bits=8), tiny, "native"), rounded_at_load)


# ---- whole folders or none


def test_shards_and_card(tmp_path: Path) -> None:
    folder = write(tmp_path / "deep" / "d", shard_bytes=60_000)
    (folder / "README.md").write_text("# My drafter\n")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size <= 60_000 for path in shards)
    index = json.loads((folder / INDEX).read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in TENSORS.values())
    write(folder)  # over it: nothing of the old one is left but what the user wrote
    assert files(folder) == ["README.md", "config.json", "model.safetensors"] and files(folder.parent) == ["d"]
    assert (folder / "README.md").read_text() == "# My drafter\n"


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file may grow past 'most' bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with full_disk(100_000), pytest.raises(UserError, match="could not be written"):
        write(tmp_path / "d")
    assert files(tmp_path) == []
    before = {path.name: path.read_bytes() for path in write(tmp_path / "d", bits=8).iterdir()}
    with full_disk(100_000), pytest.raises(UserError, match="make room"):
        write(tmp_path / "d")
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before
    assert files(tmp_path) == ["d"]


def test_an_end_between_the_two_renames_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d", bits=8)
    before = files(tmp_path / "d"), (tmp_path / "d" / "config.json").read_text()
    rename = Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        if self.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "d")
    assert files(tmp_path) == ["d"]
    assert (files(tmp_path / "d"), (tmp_path / "d" / "config.json").read_text()) == before


@pytest.mark.parametrize(
    ("name", "text"), [("notes.txt", "mine"), ("config.json", '{"model_type": "llama"}'), ("config.json", "{")]
)
def test_a_folder_that_is_no_drafter_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text(text)
    with pytest.raises(UserError, match=rf"not an exported drafter \(it holds {name}\)"):
        write(tmp_path / "d")
    assert files(tmp_path) == ["d"] and (tmp_path / "d" / name).read_text() == text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": "gguf"}, "zlab or speculators"),
        ({"bits": 4}, "16 or 8 bits"),
        ({"layout": "speculators", "target": None}, "names the drafter.s target"),
        ({"config": {**CONFIG, "dflash_config": {"mask_token_id": "x"}}}, "mask_token_id"),
        ({"tensors": TENSORS | {"norm.weight": torch.full((96,), float("nan"))}}, "norm.weight holds values"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    given = {"config": CONFIG, "tensors": TENSORS, "folder": tmp_path / "d", "layout": "zlab", **changes}
    with pytest.raises(UserError, match=says):
        export(**given)
    assert files(tmp_path) == []
