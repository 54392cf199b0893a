"""The patches that DGX Spark users apply to vLLM by hand, with the versions that need them.

Only the last two are for current versions, one of them for CPUs. The others are for builds of spring 2026, which
containers still pin. None of them edits a file: each changes a class or a name of a module after it was loaded.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from sparkdraft.bridges.vllm.plugin.patches import DoesNotApply, DoesNotConcern, Patch

GB10 = (12, 1)  # its compute capability


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise DoesNotApply(f"{module.__name__} has no {name}")
    return getattr(module, name)


def _no_cutlass_fp8(module: ModuleType) -> None:
    """On a GB10 say that the prebuilt kernels do not support FP8. Other modules take these names from this one when
    they are loaded, and it is loaded before all of them."""
    names = ("cutlass_fp8_supported", "cutlass_block_fp8_supported")
    for name in names:
        _attribute(module, name)
    capability = _attribute(module, "current_platform").get_device_capability()
    if capability is None or tuple(capability) != GB10:
        raise DoesNotConcern
    for name in names:
        setattr(module, name, lambda: False)
        setattr(module, name.upper(), False)


def _triton_non_causal(module: ModuleType) -> None:
    """With a DFlash drafter these versions ask every layer's backend whether it attends in both directions, also the
    target's, which never does so. The drafter itself gets another backend (dflash-flash-attention)."""
    backend = _attribute(module, "TritonAttentionBackend")
    if not hasattr(backend, "supports_non_causal"):
        raise DoesNotApply("backends are not asked for supports_non_causal")
    if backend.supports_non_causal():
        raise DoesNotApply("the Triton backend attends in both directions already")
    backend.supports_non_causal = classmethod(lambda cls: True)


def _draft_on_flash_attention(module: ModuleType) -> None:
    """The drafter's layers get FlashAttention, whatever backend the target has to use."""
    attention = _attribute(module, "Attention")
    if "attn_backend" not in inspect.signature(attention.__init__).parameters:
        raise DoesNotApply("a layer's backend cannot be chosen (Attention has no attn_backend)")

    def with_flash_attention(*args: Any, **kwargs: Any) -> Any:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        return attention(*args, **{"attn_backend": FlashAttentionBackend, **kwargs})

    module.Attention = with_flash_attention  # type: ignore[attr-defined]


def _qwen3_next_hidden_states(module: ModuleType) -> None:
    """The inner model hands out its hidden states; the outer class lacks what vLLM looks for."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    outer, inner = _attribute(module, "Qwen3NextForCausalLM"), _attribute(module, "Qwen3NextModel")
    if not hasattr(inner, "_set_aux_hidden_state_layers"):
        raise DoesNotApply("Qwen3NextModel does not hand out hidden states")
    if getattr(outer, "supports_eagle3", False):
        raise DoesNotApply("Qwen3NextForCausalLM has SupportsEagle3 already")
    for name in ("supports_eagle3", "set_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers"):
        setattr(outer, name, getattr(SupportsEagle3, name))
    for name in ("has_own_lm_head", "has_own_embed_tokens"):  # of the base interface, where it has them
        if hasattr(SupportsEagle3, name) and not hasattr(outer, name):
            setattr(outer, name, getattr(SupportsEagle3, name))


class _WidthOf:
    """A config whose MLP is that of its inner config."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._config, "text_config", None)
        return getattr(inner if inner is not None and name == "intermediate_size" else self._config, name)


def _gemma4_mtp_width(module: ModuleType) -> None:
    """The drafter's MLP is built with the width of the outer config, and its layers with the target's quantisation. No
    release has this: it is in container images that were built before the file was merged."""
    layer = _attribute(module, "Gemma4MTPDecoderLayer")
    build = layer.__init__
    source, parameters = inspect.getsource(build), inspect.signature(build).parameters
    if "text_config.intermediate_size" in source:
        raise DoesNotApply("it reads the inner config's width already")
    if "config.intermediate_size" not in source or not {"config", "quant_config"} <= set(parameters):
        raise DoesNotApply("its layers do not read intermediate_size from a config")

    def with_inner_width(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(build).bind(*args, **kwargs)
        given.arguments |= {"config": _WidthOf(given.arguments["config"]), "quant_config": None}
        build(*given.args, **given.kwargs)

    layer.__init__ = with_inner_width


def _turboquant_graphs(module: ModuleType) -> None:
    """Batches that verify drafts are not recorded: their lengths would be those of the trial run. Plain decoding is."""
    builder, support = _attribute(module, "TurboQuantMetadataBuilder"), _attribute(module, "AttentionCGSupport")
    if "supports_spec_as_decode=False" not in inspect.getsource(builder):
        raise DoesNotApply("batches that verify drafts are handled as decoding there")
    if builder._cudagraph_support != support.UNIFORM_BATCH:
        raise DoesNotApply("such batches are not recorded anyway")
    builder._cudagraph_support = support.UNIFORM_SINGLE_TOKEN_DECODE


def _keys_by_layer(module: ModuleType) -> None:
    """On a CPU the drafter's context keys are normed with one layer's weights for all, because the kernel there does
    not know weights by layer. What the kernel does is tried, so a build that mends it is left alone."""
    model, torch, ops = (_attribute(module, name) for name in ("DFlashQwen3Model", "torch", "ops"))
    if not _attribute(module, "current_platform").is_cpu():
        raise DoesNotConcern
    if not hasattr(model, "_normalize_context_k"):
        raise DoesNotApply("context keys are not normed by _normalize_context_k")
    keys, weights = torch.ones(2, 1, 1, 16), torch.tensor([[1.0], [2.0]]).expand(2, 16).contiguous()
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    if normed[1, 0, 0, 0] > 1.5 or "_k_norm_weights[layer_idx]" in inspect.getsource(model._normalize_context_k):
        raise DoesNotConcern

    def by_layer(self: Any, all_k: Any) -> Any:
        found = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(found[layer], all_k[layer], weight, self._rms_norm_eps)
        return found

    model._normalize_context_k = by_layer


MENDS = (
    Patch(
        "gb10-fp8-kernels",
        "kernels that compute capability 12.1 does not have are chosen for FP8 weights",
        "vllm.model_executor.layers.quantization.utils.w8a8_utils",
        _no_cutlass_fp8,
        "0.19",
        "0.22",
        ("vllm #35568", "vllm #41215"),
    ),
    Patch(
        "triton-non-causal",
        "a target that needs the Triton backend is refused with a DFlash drafter",
        "vllm.v1.attention.backends.triton_attn",
        _triton_non_causal,
        "0.19.2",
        "0.21",
        ("vllm #39930", "vllm #45163"),
    ),
    Patch(
        "dflash-flash-attention",
        "a DFlash drafter inherits the attention backend of its target",
        "vllm.model_executor.models.qwen3_dflash",
        _draft_on_flash_attention,
        "0.19.2",
        "0.21",
        ("vllm #39930",),
    ),
    Patch(
        "qwen3-next-hidden-states",
        "Qwen3-Next does not hand out its hidden states to a DFlash drafter",
        "vllm.model_executor.models.qwen3_next",
        _qwen3_next_hidden_states,
        "0.19.2",
        "0.24",
        ("vllm #45319",),
    ),
    Patch(
        "gemma4-mtp-width",
        "the MLP of Gemma 4's assistant is built with half its width, and with the target's quantisation",
        "vllm.model_executor.models.gemma4_mtp",
        _gemma4_mtp_width,
        "0.20",
        "0.21",
        ("vllm #41745",),
    ),
    Patch(
        "turboquant-verify-graphs",
        "texts turn into garbage with TurboQuant and drafts, because batches that verify drafts are recorded with the "
        "lengths of a trial run",
        "vllm.v1.attention.backends.turboquant_attn",
        _turboquant_graphs,
        "0.20",
        "",
        ("vllm #40831", "vllm #52475", "vllm #53180"),
    ),
    Patch(
        "cpu-dflash-key-norm",
        "a DFlash drafter on a CPU reads its context with the key norm of its first layer in all layers, and fewer of "
        "its drafts are accepted",
        "vllm.model_executor.models.qwen3_dflash",
        _keys_by_layer,
        "0.25",
        "",
        ("vllm/model_executor/models/qwen3_dflash.py of 0.31 and 0.32",),
    ),
)
