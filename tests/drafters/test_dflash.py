"""Draft logits equal to those of z-lab's own package, for both dialects, any chunks and any batch; and all refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.drafters.base import CommittedRows
from sparkdraft.drafters.find import default_drafter, find_drafter
from sparkdraft.engine.sampler import ids_of
from sparkdraft.kernels import native
from sparkdraft.models.registry import read_config
from sparkdraft.weights.checkpoint import open_checkpoint
from tests.drafters.tiny_drafter import DraftHarness, body, random_tensors, speculators, write_drafter, zlab
from tests.models.harness import Harness
from tests.models.tiny import TinyOf
from tests.models.tiny import oracle as target_oracle

PLACES = [
    pytest.param(("reference", "cpu"), id="cpu"),
    pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
]
TAPS = (0, 2)
MIXED, ALL_SLIDING = body("ssf", window=6), body("sss", window=5)
SWA = {"use_swa": True, "swa_window_size": 5}
SCALES = {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# name -> (config under test, the same in z-lab's words for the oracle, prefix of tensor names)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "full-8": (zlab(body()), zlab(body()), ""),
    "mixed-causal-4": (zlab(MIXED, 4), zlab(MIXED, 4), ""),
    "sliding-open-8": (zlab(ALL_SLIDING, is_causal=False), zlab(ALL_SLIDING, is_causal=False), ""),
    "full-causal-8": (zlab(body(), is_causal=True), zlab(body(), is_causal=True), ""),
    "forced-window": (zlab(body("fff"), inner=SWA), zlab(ALL_SLIDING, is_causal=False), ""),
    "scaled": (zlab(body(), inner=SCALES), zlab(body(), inner=SCALES), ""),
    "biased": (zlab(body(attention_bias=True)), zlab(body(attention_bias=True)), ""),
    "yarn": (zlab(body(rope_theta=None, rope_parameters=YARN)), zlab(body(rope_theta=None, rope_parameters=YARN)), ""),
    "speculators-full-4": (speculators(body(), 4), zlab(body(), 4), ""),
    "speculators-mixed": (speculators(MIXED), zlab(MIXED), "model."),
    "speculators-open": (
        speculators(ALL_SLIDING, sliding_window_non_causal=True),
        zlab(ALL_SLIDING, is_causal=False),
        "",
    ),
}


@pytest.fixture(scope="module", params=["llama", "qwen3-tied"])
def target_folder(request: pytest.FixtureRequest, tiny_of: TinyOf) -> Path:
    return tiny_of(request.param)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    if request.param[1] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return request.param


@pytest.fixture
def expected(tmp_path: Path, target_folder: Path) -> Callable[..., Tensor]:
    reason = "z-lab's package is not installed: pip install --no-deps dflash==0.1.0"
    dflash = pytest.importorskip("dflash.model", reason=reason)

    @torch.inference_mode()
    def logits(
        config: dict[str, Any], tensors: dict[str, Tensor], aux_hidden: Tensor, anchor: int, width: int
    ) -> Tensor:
        """z-lab's draft for one sequence, [width - 1, vocabulary], from the same features."""
        folder = tmp_path / "oracle"
        if not folder.exists():
            write_drafter(folder, config, tensors)
        model = dflash.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        target = target_oracle(target_folder)
        ids = torch.tensor([[anchor] + [model.mask_token_id] * (width - 1)])
        scale = float(dflash._draft_value(model.config, "input_embedding_scale", 1.0))
        hidden = model(
            position_ids=torch.arange(aux_hidden.shape[0] + width)[None],
            noise_embedding=dflash._raw_input_embeddings(target, ids, scale),
            target_hidden=aux_hidden.flatten(1)[None],
        )
        return model.compute_logits(hidden[:, 1:], target.lm_head)[0]

    return logits


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def aux_hidden_of(target: Harness, prompt: list[int], name: str = "a") -> Tensor:
    return target.run({name: prompt}, TAPS)[1]


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


# ---- against the oracle


@pytest.mark.parametrize("case", list(CASES))
def test_drafts_are_those_of_zlabs_package(
    case: str, target_folder: Path, place: tuple[str, str], tmp_path: Path, expected: Callable[..., Tensor]
) -> None:
    config, equivalent, prefix = CASES[case]
    dimensions = config.get("transformer_layer_config", config)
    folder = write_drafter(tmp_path / case, config, random_tensors(dimensions, prefix=prefix))
    target = Harness(target_folder, *place)
    drafts = DraftHarness(target.model, folder, *place)
    tensors, size = random_tensors(equivalent), drafts.draft.block_size
    aux_hidden = {
        name: aux_hidden_of(target, ids(length, length), name) for name, length in (("a", 1), ("b", 8), ("c", 37))
    }
    wanted = {n: expected(equivalent, tensors, t, 7, size) for n, t in aux_hidden.items()}

    drafts.observe({"a": aux_hidden["a"], "b": aux_hidden["b"][:5], "c": aux_hidden["c"][:16]})  # ragged and in chunks
    drafts.observe({"c": aux_hidden["c"][16:36], "b": aux_hidden["b"][5:]})
    drafts.observe({"c": aux_hidden["c"][36:]})
    together = drafts.propose(dict.fromkeys(aux_hidden, 7))
    for name, logits in wanted.items():
        close(together[name], logits)
        close(drafts.propose({name: 7})[name], logits)  # a proposal leaves the context as it was


def test_a_draft_goes_on_where_the_text_did(
    target_folder: Path, place: tuple[str, str], tmp_path: Path, expected: Callable[..., Tensor]
) -> None:
    """Block K/V are overwritten by what was accepted; narrower blocks and fewer wanted rows are real ones."""
    config = zlab(MIXED)
    tensors = random_tensors(config)
    target = Harness(target_folder, *place)
    drafts = DraftHarness(target.model, write_drafter(tmp_path / "d", config, tensors), *place)
    aux_hidden = aux_hidden_of(target, ids(40))
    done = 0
    for accepted, width, depth in ((9, 8, 7), (1, 8, 7), (5, 4, 3), (8, 8, 2), (3, 6, 5)):
        drafts.observe({"a": aux_hidden[done : done + accepted]})
        done += accepted
        got = drafts.propose({"a": 11 + done}, width, depth)["a"]
        close(got, expected(config, tensors, aux_hidden[:done], 11 + done, width)[:depth])


# ---- vocabularies and tables of its own


def test_a_draft_vocabulary_is_translated(tiny: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    kept = torch.randperm(320, generator=generator)[:100].sort().values
    tensors = random_tensors(body()) | {
        "lm_head.weight": torch.randn(100, 96, generator=generator),
        "embed_tokens.weight": torch.randn(320, 96, generator=generator),
        "d2t": kept - torch.arange(100),
        "t2d": torch.zeros(320, dtype=torch.bool).index_fill(0, kept, True),
    }
    folder = write_drafter(tmp_path / "d", speculators(body(), draft_vocab_size=100), tensors)
    target = Harness(tiny)
    drafts = DraftHarness(target.model, folder)
    plain = DraftHarness(target.model, write_drafter(tmp_path / "p", zlab(body()), random_tensors(body())))
    aux_hidden = aux_hidden_of(target, ids(12))
    for harness in (drafts, plain):
        harness.observe({"a": aux_hidden})
    full = torch.zeros(320, 96).index_copy(0, kept, tensors["lm_head.weight"])
    plain.drafter.ends = type(plain.drafter.ends)(
        tensors["embed_tokens.weight"], 1.0, None, plain.drafter.ends.norm, type(target.model.head)(full), None
    )
    got, wanted = drafts.propose({"a": 7})["a"], plain.propose({"a": 7})["a"]
    close(got, wanted[:, kept])
    assert torch.equal(drafts.drafter.ends.ids, kept) and plain.drafter.ends.ids is None


def test_a_mask_row_of_its_own(tiny: Path, tmp_path: Path) -> None:
    target = Harness(tiny)
    row = torch.randn(96, generator=torch.Generator().manual_seed(3))
    tensors = random_tensors(body())
    own = DraftHarness(target.model, write_drafter(tmp_path / "own", zlab(body()), tensors | {"mask_embedding": row}))
    plain = DraftHarness(target.model, write_drafter(tmp_path / "plain", zlab(body()), tensors))
    aux_hidden = aux_hidden_of(target, ids(12))
    for harness in (own, plain):
        harness.observe({"a": aux_hidden})
    before = plain.propose({"a": 7})["a"]
    assert isinstance(target.model.embedding, Tensor)
    target.model.embedding[own.draft.mask_token_id] = row
    assert not torch.allclose(own.propose({"a": 7})["a"], before)
    close(own.propose({"a": 7})["a"], plain.propose({"a": 7})["a"])


# ---- native kernels


@pytest.fixture
def packed(tiny: Path, tmp_path: Path) -> tuple[Harness, DraftHarness, Path]:
    if native.unavailable_reason():
        pytest.skip(str(native.unavailable_reason()))
    folder = write_drafter(tmp_path / "d", zlab(MIXED), random_tensors(MIXED))
    target = Harness(tiny, "native")
    return target, DraftHarness(target.model, folder, "native"), folder


def test_packed_weights_draft_nearly_the_same(packed: tuple[Harness, DraftHarness, Path], tiny: Path) -> None:
    target, drafts, folder = packed
    dense = DraftHarness(Harness(tiny).model, folder)
    aux_hidden = {"a": aux_hidden_of(target, ids(12), "a"), "b": aux_hidden_of(target, ids(30, 1), "b")}
    dense.observe(aux_hidden)
    drafts.observe(aux_hidden)
    together, wanted = drafts.propose({"a": 7, "b": 9}), dense.propose({"a": 7, "b": 9})
    for name, anchor in (("a", 7), ("b", 9)):
        assert torch.equal(together[name], drafts.propose({name: anchor})[name])  # a row does not know its neighbours
        assert torch.cosine_similarity(together[name], wanted[name]).min() > 0.99  # 8 bits, 3 layers


@torch.inference_mode()
def test_observe_and_propose_are_recorded(packed: tuple[Harness, DraftHarness, Path]) -> None:
    target, drafts, _ = packed
    for seq in ("a", "b"):
        drafts.observe({seq: aux_hidden_of(target, ids(20, ord(seq)), seq)})
    drafter = drafts.drafter
    aux_hidden, positions, slots = torch.randn(3, 2, 96), drafts.int32([20, 21, 20]), drafts.int32([0, 1, 2])
    slots.copy_(drafts.int32(drafts.slots("a", 20, 22) + drafts.slots("b", 20, 21)))

    def observe() -> Tensor:
        drafter.observe(CommittedRows(aux_hidden, positions, slots))
        return aux_hidden

    block = drafts.block({"a": 7, "b": 9}, 8, 7)
    observing, proposing = native.Graph(observe), native.Graph(lambda: drafter.logits(block))
    for seed in range(3):
        aux_hidden.copy_(torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(seed)))
        block.token_ids[::8] = torch.tensor([20 + seed, 30 + seed], dtype=torch.int32)
        block.positions.sub_(1)
        block.view.context_len.sub_(1)
        block.draft_rows.copy_(block.draft_rows.flip(0))
        observing.replay()
        logits = proposing.replay().clone()
        caches = [*drafts.kv.k, *drafts.kv.v]
        kept = [cache.clone() for cache in caches]
        for cache in caches:
            cache[slots.long() // 8, :, slots.long() % 8] = math.nan
        observe()
        assert torch.equal(drafter.logits(block), logits)
        for cache, before in zip(caches, kept, strict=True):
            assert torch.equal(cache.nan_to_num(), before.nan_to_num())


# ---- damaged and incomplete files


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"hidden_norm.weight": None}, "hidden_norm.weight is missing"),
        ({"layers.1.self_attn.k_norm.weight": None}, "layers.1.self_attn.k_norm.weight is missing"),
        ({"fc.weight": torch.zeros(96, 96)}, "fc.weight has shape"),
        ({"layers.0.attention_conv.base_kernel": torch.zeros(2)}, "belong to no part"),
        ({"lm_head.weight": torch.zeros(100, 96), "d2t": None}, "d2t is missing"),
        ({"lm_head.weight": torch.zeros(100, 96), "d2t": torch.full((100,), 300)}, "outside the vocabulary"),
        ({"lm_head.weight": torch.zeros(100, 96), "d2t": torch.zeros(100)}, "holds no integers"),
        ({"lm_head.weight": torch.zeros(90, 96)}, "lm_head.weight has shape"),
    ],
)
def test_damaged_checkpoints_are_named(damage: dict[str, Tensor | None], says: str, tiny: Path, tmp_path: Path) -> None:
    changed = random_tensors(body()) | {"d2t": torch.zeros(100, dtype=torch.int64)} | damage
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    folder = write_drafter(tmp_path / "d", speculators(body(), draft_vocab_size=100), tensors)
    with pytest.raises(UserError, match=says):
        DraftHarness(Harness(tiny).model, folder)


def test_a_mask_embedding_in_a_pickle_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "d", zlab(body()), random_tensors(body()))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="mask_embedding"):
        DraftHarness(Harness(tiny).model, folder)


# ---- the drafter that travels with the package


def test_the_embedded_drafter_knows_its_model(smollm2_path: Path) -> None:
    """Right hidden states, norms, rotation and mask id show in how often the first draft is what the model says."""
    folder = default_drafter("smollm2")
    if folder is None or native.unavailable_reason():
        pytest.skip("no embedded drafter, or no native kernels")
    target = Harness(smollm2_path, "native")
    drafts = DraftHarness(target.model, Path(folder), "native")
    chat = "<|im_start|>user\nWrite a Python function that sorts a list.<|im_end|>\n<|im_start|>assistant\n"
    prompt = open_checkpoint(str(smollm2_path)).tokenizer_json().encode(chat).ids
    aux_hidden = drafts.drafter.caps.aux_layers
    logits, rows = target.run({"a": prompt}, aux_hidden)
    hits = []
    for _ in range(60):
        anchor = int(logits["a"][-1].argmax())
        drafts.observe({"a": rows})
        best = drafts.propose({"a": anchor})["a"][:1].argmax(-1)
        guess = int(ids_of(best, drafts.drafter.ends.ids))
        logits, rows = target.run({"a": [anchor]}, aux_hidden)
        hits.append(guess == int(logits["a"][-1].argmax()))
    assert sum(hits) >= 42, f"{sum(hits)} of {len(hits)}"


def test_tables_of_its_own_are_in_the_plan(tiny: Path, tmp_path: Path) -> None:
    target = read_config(open_checkpoint(str(tiny)).config)
    bare, table = random_tensors(body()), torch.zeros(320, 96)
    few = {"lm_head.weight": table[:100].clone(), "d2t": torch.arange(100), "verifier_lm_head.weight": table.clone()}
    cases = {
        "none": (bare, {}, 0),
        "embedding": (bare | {"embed_tokens.weight": table}, {}, 320 * 96),
        "both": (bare | {"embed_tokens.weight": table, "lm_head.weight": table.clone()}, {}, 2 * 320 * 96),
        "few": (bare | few, {"draft_vocab_size": 100}, 100 * 96),
        "rows": (bare, {"draft_vocab_size": 100}, 100 * 96),  # of the target's head, which are copied
    }
    found = {}
    for name, (tensors, options, _) in cases.items():
        folder = write_drafter(tmp_path / name, speculators(body(), **options), tensors)
        found[name] = find_drafter(str(folder), target).caps.num_weights
    for name, (_, _, extra) in cases.items():
        assert found[name] - found["none"] == extra, name
