"""The plugin's patches without vLLM: which versions need which, that they wait for their module, and each of them on a
module that looks like the broken one and on one that looks mended."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparkdraft.bridges.vllm import plugin
from sparkdraft.bridges.vllm.plugin import mends
from sparkdraft.bridges.vllm.plugin.mends import MENDS
from sparkdraft.bridges.vllm.plugin.patches import (
    APPLIED,
    FAILED,
    NOT_NEEDED,
    SKIPPED,
    WAITING,
    DoesNotApply,
    DoesNotConcern,
    Patch,
    Patches,
)

FP8, TRITON, DRAFT, NEXT, GEMMA, TURBO, KEYS = (patch.name for patch in MENDS)
BY_NAME = {patch.name: patch for patch in MENDS}


@pytest.fixture(autouse=True)
def finders() -> Iterator[None]:
    """Whatever a test binds does not stay bound."""
    kept = list(sys.meta_path)
    yield
    sys.meta_path[:] = kept


@pytest.mark.parametrize(
    ("version", "needed"),
    [
        ("0.18.1", set()),
        ("0.19.1", {FP8}),
        ("0.19.2rc1.dev21+g893611813", {FP8, TRITON, DRAFT, NEXT}),
        ("0.20.2", {FP8, TRITON, DRAFT, NEXT, GEMMA, TURBO}),
        ("0.21.0", {FP8, NEXT, TURBO}),
        ("0.22.1", {NEXT, TURBO}),
        ("0.23.0", {NEXT, TURBO}),
        ("0.24.0", {TURBO}),
        ("0.25.1", {TURBO, KEYS}),
        ("0.32.0+cpu", {TURBO, KEYS}),
    ],
)
def test_each_version_gets_the_patches_that_it_needs(version: str, needed: set[str]) -> None:
    said: list[str] = []
    patches = Patches(MENDS, version, "", said.append)
    assert {name for name, state in patches.states.items() if state == WAITING} == needed and not said
    assert patches.count(NOT_NEEDED) == len(MENDS) - len(needed)


def test_patches_are_left_out_by_name_and_a_wrong_name_is_reported() -> None:
    said: list[str] = []
    patches = Patches(MENDS, "0.20.2", f" {TURBO} , {NEXT},gemma", said.append)
    assert patches.states[TURBO] == patches.states[NEXT] == SKIPPED and patches.count(WAITING) == 4
    assert len(said) == 1 and "no patch is named gemma; there are" in said[0] and GEMMA in said[0]
    said.clear()
    assert Patches(MENDS, "", "", said.append).count(FAILED) == len(MENDS) and "no version" in said[0]


def _module(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return name


def test_a_patch_waits_for_its_module_and_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong, right = (_module(tmp_path, f"patched_{word}", "WIDTH = 4\n") for word in ("wrong", "right"))

    def widen(module: ModuleType) -> None:
        module.WIDTH = 8  # type: ignore[attr-defined]

    def refuse(module: ModuleType) -> None:
        raise DoesNotApply("WIDTH is not what it was")

    def leave(module: ModuleType) -> None:
        raise DoesNotConcern

    said: list[str] = []
    other = Patches([Patch("leave", "another machine", "json", leave, "0.20", "", ())], "0.20.2", "", said.append)
    other.bind()  # its module is loaded
    assert other.states == {"leave": NOT_NEEDED} and not said
    all_of_it = [
        Patch("widen", "it is narrow", right, widen, "0.20", "0.21", ()),
        Patch("refuse", "it is wide", wrong, refuse, "0.20", "", ()),
    ]
    newer = Patches(all_of_it[:1], "0.21.0", "", said.append)
    before = list(sys.meta_path)
    newer.bind()
    assert sys.meta_path == before and not said, "a version that needs nothing is left alone"
    patches = Patches(all_of_it, "0.20.2", "", said.append)
    patches.bind()
    assert patches.count(WAITING) == 2 and right not in sys.modules and not said
    module = importlib.import_module(right)
    assert module.WIDTH == 8 and patches.states["widen"] == APPLIED
    assert type(module.__loader__).__name__ == "SourceFileLoader" and importlib.reload(module).WIDTH == 4
    assert importlib.import_module(wrong).WIDTH == 4 and patches.states["refuse"] == FAILED
    assert said[-1] == (
        "sparkdraft: the patch refuse does not apply to vLLM 0.20.2: WIDTH is not what it was; without it, it is wide"
    )
    late = Patches(all_of_it, "0.20.2", "", said.append)
    late.bind()  # both modules are loaded
    assert late.states == {"widen": APPLIED, "refuse": FAILED}


def test_register_is_called_again_without_harm(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(plugin, "_patches", None)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setenv(plugin.SKIP, TURBO)
    assert plugin.states() == {}
    with caplog.at_level(logging.WARNING):
        plugin.register()
        first = plugin._patches
        plugin.register()
    assert plugin._patches is first and plugin.states()[TURBO] == SKIPPED and not caplog.records
    assert plugin.failures() == []


def _refused(name: str, module: Any) -> str:
    with pytest.raises(DoesNotApply) as error:
        BY_NAME[name].apply(module)
    return str(error.value)


def test_fp8_kernels_are_refused_on_a_gb10_alone() -> None:
    def module(capability: tuple[int, int] | None) -> Any:
        found = {"cutlass_fp8_supported": lambda: True, "cutlass_block_fp8_supported": lambda: True}
        platform = SimpleNamespace(get_device_capability=lambda: capability)
        return SimpleNamespace(__name__="w8a8_utils", current_platform=platform, CUTLASS_FP8_SUPPORTED=True, **found)

    gb10 = module((12, 1))
    BY_NAME[FP8].apply(gb10)
    assert not gb10.cutlass_fp8_supported() and not gb10.cutlass_block_fp8_supported()
    assert gb10.CUTLASS_FP8_SUPPORTED is gb10.CUTLASS_BLOCK_FP8_SUPPORTED is False
    for capability in ((9, 0), None):
        with pytest.raises(DoesNotConcern):
            BY_NAME[FP8].apply(module(capability))
    assert "has no cutlass_fp8_supported" in _refused(FP8, SimpleNamespace(__name__="w8a8_utils"))


def test_the_triton_backend_says_that_it_is_not_causal() -> None:
    class Base:
        @classmethod
        def supports_non_causal(cls) -> bool:
            return False

    class Triton(Base):
        pass

    BY_NAME[TRITON].apply(SimpleNamespace(__name__="triton_attn", TritonAttentionBackend=Triton))  # type: ignore[arg-type]
    assert Triton.supports_non_causal() and not Base.supports_non_causal()
    again = SimpleNamespace(__name__="triton_attn", TritonAttentionBackend=Triton)
    assert "in both directions already" in _refused(TRITON, again)
    assert "not asked" in _refused(TRITON, SimpleNamespace(__name__="t", TritonAttentionBackend=object))


def test_a_drafter_gets_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention:
        def __init__(self, heads: int, attn_backend: Any = None) -> None:
            self.heads, self.backend = heads, attn_backend

    flash = ModuleType("flash_attn")
    flash.FlashAttentionBackend = "FLASH"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.flash_attn", flash)
    module: Any = SimpleNamespace(__name__="qwen3_dflash", Attention=Attention)
    BY_NAME[DRAFT].apply(module)
    assert module.Attention(4).backend == "FLASH" and module.Attention(4, attn_backend="OTHER").backend == "OTHER"
    assert "cannot be chosen" in _refused(DRAFT, SimpleNamespace(__name__="q", Attention=dict))


def test_qwen3_next_hands_out_its_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class SupportsEagle3:
        supports_eagle3 = True

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            self.model._set_aux_hidden_state_layers(layers)  # type: ignore[attr-defined]

        def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
            return (1,)

    class Inner:
        layers: tuple[int, ...] = ()

        def _set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            self.layers = layers

    class Outer:
        def __init__(self) -> None:
            self.model = Inner()

    interfaces = ModuleType("interfaces")
    interfaces.SupportsEagle3 = SupportsEagle3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.interfaces", interfaces)
    module: Any = SimpleNamespace(__name__="qwen3_next", Qwen3NextForCausalLM=Outer, Qwen3NextModel=Inner)
    BY_NAME[NEXT].apply(module)
    model: Any = Outer()
    model.set_aux_hidden_state_layers((2, 9))
    assert model.supports_eagle3 and model.model.layers == (2, 9)
    assert "already" in _refused(NEXT, module)
    module.Qwen3NextModel = object
    assert "does not hand out" in _refused(NEXT, module)


class _Half:
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        self.width, self.quant, self.heads = config.intermediate_size, quant_config, config.heads


class _Whole:
    def __init__(self, config: Any, quant_config: Any = None) -> None:
        text_config = config.text_config
        self.width = text_config.intermediate_size


def test_the_assistant_of_gemma4_gets_its_whole_width() -> None:
    config = SimpleNamespace(intermediate_size=4096, heads=8, text_config=SimpleNamespace(intermediate_size=8192))
    module: Any = SimpleNamespace(__name__="gemma4_mtp", Gemma4MTPDecoderLayer=_Half)
    assert _Half(config, "fp8").width == 4096
    BY_NAME[GEMMA].apply(module)
    layer = _Half(config, "fp8", prefix="layers.0")
    assert (layer.width, layer.quant, layer.heads) == (8192, None, 8)
    module.Gemma4MTPDecoderLayer = _Whole
    assert "already" in _refused(GEMMA, module)
    module.Gemma4MTPDecoderLayer = SimpleNamespace
    assert "do not read" in _refused(GEMMA, SimpleNamespace(__name__="g", Gemma4MTPDecoderLayer=mends._WidthOf))


class _Support:
    UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE = 2, 1


class _Builder:
    _cudagraph_support = _Support.UNIFORM_BATCH

    def __init__(self) -> None:
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)

    def _init_reorder_batch_threshold(self, count: int, supports_spec_as_decode: bool) -> None:
        pass


def test_batches_that_verify_are_not_recorded_with_turboquant() -> None:
    module: Any = SimpleNamespace(
        __name__="turboquant_attn", TurboQuantMetadataBuilder=_Builder, AttentionCGSupport=_Support
    )
    BY_NAME[TURBO].apply(module)
    assert _Builder._cudagraph_support == _Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert "not recorded anyway" in _refused(TURBO, module)
    module.TurboQuantMetadataBuilder = _Half
    assert "handled as decoding" in _refused(TURBO, module)


class _Keys:
    _rms_norm_eps = 1e-6

    def __init__(self, weights: torch.Tensor) -> None:
        self._k_norm_weights = weights

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_keys_are_normed_by_layer_on_a_cpu_whose_kernel_does_not() -> None:
    def rms_norm(out: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        scale = weights.reshape(-1, weights.shape[-1])[0]  # as the kernel for CPUs does
        out.copy_(keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + eps) * scale)

    def module(is_cpu: bool = True, norm: Any = rms_norm, model: Any = _Keys) -> Any:
        ops, platform = SimpleNamespace(rms_norm=norm), SimpleNamespace(is_cpu=lambda: is_cpu)
        found = {"current_platform": platform, "ops": ops, "torch": torch, "DFlashQwen3Model": model}
        return SimpleNamespace(__name__="qwen3_dflash", **found)

    def right(out: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        rms_norm(out, keys, torch.ones(keys.shape[-1]), eps)
        out *= weights[:, None, None]

    for other in (module(is_cpu=False), module(norm=right)):
        with pytest.raises(DoesNotConcern):
            BY_NAME[KEYS].apply(other)
    assert "not normed by" in _refused(KEYS, module(model=object))
    BY_NAME[KEYS].apply(module())
    keys, weights = torch.randn(3, 4, 2, 16), torch.randn(3, 16)
    expected = torch.empty_like(keys)
    right(expected, keys, weights, 1e-6)
    assert torch.allclose(_Keys(weights)._normalize_context_k(keys), expected)
