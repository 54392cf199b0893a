"""Writes tests/weights/published: tiny checkpoints by the tools that publish quantised models, and what they decode to.

    python -m venv V
    V/bin/pip install torch transformers datasets compressed-tensors auto-round gptqmodel autoawq nvidia-modelopt
    V/bin/python tests/weights/make_published.py compressed   (or auto_round, gptq, awq, modelopt)

Each folder is a checkpoint as its tool wrote it, and expected.json: for every quantised matrix the type, the digest and
the first numbers of what the tool's own library decodes it to. Those packages are no part of this project's
environment, so the folders are committed; test_published.py reads them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent / "published"
SHAPE = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.05 if parameter.dim() > 1 else parameter.data
    return model.bfloat16()


def digest(weight: Tensor) -> dict[str, Any]:
    whole = (weight + 0).contiguous()  # no negative zeros: products with zero have lost them
    raw = whole.view(torch.uint8).flatten()
    return {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "first": weight.flatten()[:4].float().tolist(),
        "sha256": hashlib.sha256(bytes(raw.tolist())).hexdigest(),
    }


def finish(folder: Path, weights: dict[str, Tensor]) -> None:
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors", "quantization_config.json", "hf_quant_config.json"):
            file.unlink() if file.is_file() else shutil.rmtree(file)
    expected = {name: digest(weight) for name, weight in sorted(weights.items())}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(folder, len(expected), sum(f.stat().st_size for f in folder.iterdir()))


# ---- compressed-tensors


def compressed() -> None:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    for name in ("FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "W4A16", "W4A16_ASYM", "W8A16", "INT8"):
        scheme: QuantizationScheme = preset_name_to_scheme(name, ["Linear"])
        if name.startswith("W"):
            scheme.weights.group_size = 32
        if name == "FP8_BLOCK":
            scheme.weights.block_structure = [48, 48]  # so that a tiny matrix has several, and ragged ones
        compress_one(HERE / f"compressed-tensors-{name.lower()}", scheme)


def compress_one(folder: Path, scheme: Any) -> None:
    from compressed_tensors.compressors import ModelCompressor, decompress_module
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = tiny()
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    quantised = {name: m for name, m in model.named_modules() if getattr(m, "quantization_scheme", None)}
    for number, module in enumerate(quantised.values()):
        set_scales(module, scheme.weights, 1 + number / 8)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    for module in quantised.values():
        decompress_module(module)
    finish(folder, {name: module.weight.data for name, module in quantised.items()})


def set_scales(module: Any, args: Any, widen: float) -> None:
    """By the least and the largest weight. widen: so that no two matrices have the same scale of the tensor."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.data.float()
    whole = None
    if hasattr(module, "weight_global_scale"):
        whole = generate_gparam(weight.min() * widen, weight.max() * widen)
        module.weight_global_scale.data.copy_(whole)
    if args.block_structure:
        rows, columns = args.block_structure
        blocks = [list(r.split(columns, 1)) for r in weight.split(rows)]
        least, most = (torch.stack([torch.stack([f(b) for b in r]) for r in blocks]) for f in (torch.amin, torch.amax))
    elif args.group_size:
        groups = weight.unflatten(1, (-1, args.group_size))
        least, most = groups.amin(-1), groups.amax(-1)
    else:
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale, zero = calculate_qparams(least, most, args, whole)
    module.weight_scale.data = scale.to(module.weight_scale.dtype).view(module.weight_scale.shape)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype).view(module.weight_zero_point.shape)


# ---- AutoRound


def auto_round() -> None:
    from auto_round import AutoRound

    source = HERE.parent / "source"
    save_with_tokenizer(source)
    for name, scheme, options, form in (
        ("sym", "W4A16", {"sym": True, "group_size": 32}, "auto_round"),
        ("asym", "W4A16", {"sym": False, "group_size": 32}, "auto_round"),
        ("awq", "W4A16", {"sym": False, "group_size": 32}, "auto_round:auto_awq"),
        ("mxfp4", "MXFP4", {}, "auto_round"),
    ):
        folder = HERE / f"auto-round-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        tool = AutoRound(str(source), scheme=scheme, iters=0, disable_opt_rtn=True, **options)
        tool.quantize_and_save(str(folder), format=form)
        inner = next((f for f in folder.rglob("model.safetensors")), None)
        if inner and inner.parent != folder:
            for file in inner.parent.iterdir():
                file.rename(folder / file.name)
        decoded = decoded_by_auto_round(folder)
        # Its own layers compute (code - zero) * scale in float16.
        finish(folder, decoded if options.get("sym", True) else {k: w.half() for k, w in decoded.items()})
    shutil.rmtree(source)


def decoded_by_auto_round(folder: Path) -> dict[str, Tensor]:
    """What its own layers make of the unit matrix is their weight."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            width = getattr(module, "in_features", None) or module.infeatures
            with torch.inference_mode():
                found[name] = module(torch.eye(width)).t().contiguous()
    return found


def save_with_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny().save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2").save_pretrained(folder)


# ---- GPTQ and AWQ: the packers of their libraries


def least_and_most(weight: Tensor, group: int, sym: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [out, groups] of 4 bits, as both tools choose them."""
    groups = weight.unflatten(1, (-1, group))
    if sym:
        return (groups.abs().amax(-1) / 7).half().float(), torch.full(groups.shape[:2], 8.0)
    least, most = groups.amin(-1).clamp(max=-1e-3), groups.amax(-1).clamp(min=1e-3)
    scale = ((most - least) / 15).half().float()
    return scale, (-least / scale).round().clamp(1, 15)


def gptq() -> None:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, sym, desc_act, version in (
        ("sym", True, False, "gptq"),
        ("desc-act", False, True, "gptq"),
        ("v2", False, False, "gptq_v2"),
    ):
        config = QuantizeConfig(bits=4, group_size=32, sym=sym, desc_act=desc_act, format=version)
        tensors, decoded, model = {}, {}, tiny()
        for module_name, linear in projections(model).items():
            out, width = linear.weight.shape
            order = torch.randperm(width) if desc_act else torch.arange(width)
            scale, zeros = least_and_most(linear.weight.data[:, order], 32, sym)
            groups = torch.empty(width, dtype=torch.int32)
            groups[order] = torch.arange(width, dtype=torch.int32) // 32
            layer = TorchLinear(4, 32, sym, desc_act, width, out, bias=False)
            layer.pack_original(linear, scale, zeros, groups)
            layer.post_init()
            decoded[module_name] = layer.dequantize_weight().t().contiguous()
            if version == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, config)
            tensors |= {f"{module_name}.{k}": getattr(layer, k) for k in ("qweight", "scales", "qzeros", "g_idx")}
        save(HERE / f"gptq-{name}", model, tensors, config.to_dict())
        finish(HERE / f"gptq-{name}", decoded)


def awq() -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    tensors, decoded, model = {}, {}, tiny()
    for name, linear in projections(model).items():
        scale, zeros = least_and_most(linear.weight.data, 32, sym=False)
        layer = WQLinear_GEMM.from_linear(linear, 4, 32, False, scale.t().contiguous(), zeros.t().contiguous())
        parts = {k: getattr(layer, k) for k in ("qweight", "scales", "qzeros")}
        tensors |= {f"{name}.{k}": v for k, v in parts.items()}
        decoded[name] = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 32).t().contiguous()
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    save(HERE / "awq-gemm", model, tensors, said)
    finish(HERE / "awq-gemm", decoded)


def projections(model: Any) -> dict[str, Any]:
    found = {name: module.float() for name, module in model.named_modules() if name.endswith("_proj")}
    for module in found.values():
        module.weight.data = module.weight.data.contiguous()
    return found


def save(folder: Path, model: Any, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dense = {k: v.bfloat16() for k, v in model.state_dict().items() if not k.endswith("_proj.weight")}
    save_file({k: v.clone().contiguous() for k, v in (dense | tensors).items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}, indent=1) + "\n")


# ---- ModelOpt


def modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file

    for name, config in (("nvfp4", mtq.NVFP4_DEFAULT_CFG), ("fp8", mtq.FP8_DEFAULT_CFG)):
        folder, model = HERE / f"modelopt-{name}", tiny()
        model.config.architectures = ["Qwen3ForCausalLM"]
        mtq.quantize(model, config, lambda model: model(torch.arange(16).view(1, 16)))
        export_hf_checkpoint(model, export_dir=folder)
        tensors, decoded = load_file(folder / "model.safetensors"), {}
        for module in (key.removesuffix(".weight") for key in tensors if key.endswith("_proj.weight")):
            codes, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
            if name == "fp8":
                decoded[module] = codes.float() * scale.float()
                continue
            whole = NVFP4QTensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.bfloat16, codes)
            double = tensors[f"{module}.weight_scale_2"]
            decoded[module] = whole.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
        finish(folder, decoded)


TOOLS = {"compressed": compressed, "auto_round": auto_round, "gptq": gptq, "awq": awq, "modelopt": modelopt}

if __name__ == "__main__":
    TOOLS[sys.argv[1]]()
