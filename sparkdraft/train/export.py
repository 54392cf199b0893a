"""Writes a drafter as a checkpoint that others load: z-lab's layout, or that of speculators, in 16 or in 8 bits.

Tensors keep z-lab's names in both layouts; config.json differs, and a config that the other layout cannot express is
refused. A folder appears whole or not at all: it is written beside its place and renamed at the end.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.drafters.dflash import SINK_KEY, WINDOW_KEY, DFlashConfig
from sparkdraft.weights.checkpoint import open_checkpoint
from sparkdraft.weights.quant.compressed_tensors import INT8_GROUPS, SCALE
from sparkdraft.weights.quant.stored import GROUP, GroupQuant, as_float
from sparkdraft.weights.safetensors import INDEX, follow_umask

LAYOUTS = ("zlab", "speculators")
SHARD_BYTES = 15 * 2**20  # some hosts take no larger files
CARD = "README.md"  # the user's own: it stays
FILES = ("config.json", CARD, INDEX, "model*.safetensors")  # all files of an exported drafter's folder
HEADER = 160  # most bytes of a file's header per tensor, beside its name
OUTER = (
    "architectures", "auto_map", "block_size", "dflash_config", "draft_vocab_size", "num_target_layers", "is_causal",
    "dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The model that a drafter was trained for, as the speculators layout names it ("verifier")."""

    name: str  # a hub id, or a folder
    architectures: Sequence[str] = ()


def export(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    folder: Path,
    layout: str,
    bits: int = 16,
    target: ExportTarget | None = None,
    shard_bytes: int = SHARD_BYTES,
    vocabulary: Tensor | None = None,
    head: Tensor | None = None,
) -> str:
    """config: a whole config.json in z-lab's layout. tensors: floats under z-lab's names. Replaces an older export,
    but for its README.md. Returns what the layout does not say of this drafter, in a sentence for users; empty: it says
    all.

    A file is larger than 'shard_bytes' only if a single tensor is. vocabulary: int64, ascending: the only ids to be
    drafted. The engine takes their rows of the target's head; z-lab's own program drafts among all ids as before. The
    speculators layout keeps these rows beside the drafter, so there they must be given as 'head'.
    """
    if layout not in LAYOUTS:
        raise UserError(f"The layout is '{layout}'; drafters are exported as {' or '.join(LAYOUTS)}")
    if bits not in (16, 8):
        raise UserError(f"bits is {bits}; drafters are exported in 16 or 8 bits")
    if vocabulary is not None:
        if layout != "zlab" and head is None:
            raise UserError("The speculators layout keeps a head beside a smaller vocabulary: give the target's rows")
        config = {**config, "draft_vocab_size": len(vocabulary)}
    written = _zlab_config(config) if layout == "zlab" else speculators_config(config, target)
    stored = _sixteen_bits(tensors) if bits == 16 else _eight_bits(tensors)
    if bits == 8:
        kept = [n.removesuffix(".weight") for n, t in tensors.items() if t.dim() == 2 and n + SCALE not in stored]
        written["quantization_config"] = _quantization(kept)
    if vocabulary is not None:
        stored["d2t"] = vocabulary - torch.arange(len(vocabulary))
        if layout != "zlab" and head is not None:
            assert head.shape == (len(vocabulary), written["target_hidden_size"]), head.shape
            stored["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, vocabulary, True)
            stored |= _sixteen_bits({"lm_head.weight": head})
    with _new_folder(folder) as place:
        (place / "config.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        _write_shards(place, stored, shard_bytes)
    sees = DFlashConfig.read(config).sees
    if layout == "zlab" or sees is None:
        return ""
    return (
        f"this drafter is to be shown the first {sees.first} and the last {sees.last} tokens of a context: vLLM shows "
        f"it all of them, and past {sees.first + sees.last} fewer drafts may be accepted"
    )


def read_drafter(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor | None]:
    """A drafter in z-lab's layout, as `export` takes it: config, float tensors, and the ids that it drafts, if not all.

    name: a folder or a hub id.
    """
    source = open_checkpoint(name)
    if "speculators_config" in source.config:
        raise UserError(f"{name} is in the speculators layout; drafters in z-lab's layout are converted")
    DFlashConfig.read(source.config)
    names = source.names()
    ids = None
    if "d2t" in names:
        offsets = source.read("d2t")
        assert isinstance(offsets, Tensor)
        ids = offsets.long() + torch.arange(len(offsets))
    return source.config, {each: as_float(source.read(each)) for each in names if each not in ("d2t", "t2d")}, ids


# ---- the configs


def _zlab_config(config: Mapping[str, Any]) -> dict[str, Any]:
    DFlashConfig.read(config)  # refuses what we could not load ourselves
    return {**{k: v for k, v in config.items() if k != "quantization_config"}, "dtype": "bfloat16"}


def speculators_config(config: Mapping[str, Any], target: ExportTarget | None) -> dict[str, Any]:
    """The same drafter as speculators describes it: layer ids one higher, dimensions in a record of their own.

    As version 0.9 writes them, checkpoints with the target's whole vocabulary have neither embedding nor head; those
    with a smaller one have the head's rows (lm_head), their ids (d2t: id less row) and which ids have one (t2d).
    """
    if target is None:
        raise UserError("The speculators layout names the drafter's target: give it")
    draft = DFlashConfig.read(config)
    windows = [spec.window for spec in draft.model.attention]
    drafts = {"proposal_type": "greedy", "speculative_tokens": draft.block_size - 1}
    body = {k: v for k, v in config.items() if k not in (*OUTER, "quantization_config")}
    body |= {"layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}
    body |= {"sliding_window": max(windows) or None, "use_sliding_window": any(windows)}
    if draft.sees:  # among the layers' dimensions, where other programs pass over keys that they do not know
        body |= {SINK_KEY: draft.sees.first, WINDOW_KEY: draft.sees.last}
    written = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**drafts, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in draft.aux_layers],
        "block_size": draft.block_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "mask_token_id": draft.mask_token_id,
        "target_hidden_size": draft.target_hidden_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not any(spec.causal for spec in draft.model.attention if spec.window),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": body,
    }
    scale = draft.input_embedding_scale or 1.0  # targets that the trainer takes do not scale their embedding
    if DFlashConfig.read(written) != replace(draft, num_target_layers=None, input_embedding_scale=scale):
        raise UserError(
            "The speculators layout cannot express this drafter's masks or scales (causal full layers, windows that "
            "differ, an embedding scale, a multiplier or a softcap): export it as zlab."
        )
    return written


def _quantization(kept: list[str]) -> dict[str, Any]:
    weights = {**INT8_GROUPS, "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    linear = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": linear},
        "ignore": ["lm_head", *kept],  # the target's head is never rounded, whether it is borrowed or has rows here
        "kv_cache_scheme": None,
    }


# ---- the tensors


def _sixteen_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _finite(name, tensor).to(torch.bfloat16) for name, tensor in tensors.items()}


def _eight_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as integers and their scales; vectors, and matrices that do not divide into groups, as in 16 bits."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight") and tensor.shape[1] % GROUP == 0:
            group = GroupQuant.from_float(_finite(name, tensor))
            stored |= {name: group.q.flatten(1), name + SCALE: group.scale}
        else:
            stored |= _sixteen_bits({name: tensor})
    return stored


def _finite(name: str, tensor: Tensor) -> Tensor:
    value = tensor.detach().cpu().contiguous()
    assert value.is_floating_point(), f"{name} is {value.dtype}"
    if not bool(torch.isfinite(value).all()):
        raise UserError(f"{name} holds values that are no numbers: the training went astray; export an earlier state")
    return value


# ---- the files


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A place to write to, which becomes 'folder' if all goes well, and otherwise leaves no trace."""
    folder = folder.resolve()
    _check_replaceable(folder)
    mark = secrets.token_hex(4)
    place, old = (folder.with_name(f".{folder.name}.{mark}.{end}") for end in ("new", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir()
        yield place
        follow_umask(place)
        if folder.exists():
            if (folder / CARD).is_file():
                shutil.copy2(folder / CARD, place)
            folder.rename(old)
        place.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The drafter could not be written to {folder} ({error}): make room, or name another"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if old.exists() and not folder.exists():  # stopped between the two renames
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Only an export is ever replaced: a folder with a drafter's config and only files that an export writes."""
    if not folder.exists():
        return
    held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    foreign = [name for name in held if not any(fnmatch(name, pattern) for pattern in FILES)]
    if not foreign and held:
        try:
            DFlashConfig.read(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, UserError):
            foreign = held
    if foreign:
        raise UserError(f"{folder} exists and is not an exported drafter (it holds {foreign[0]}): name another folder")


def _write_shards(place: Path, stored: dict[str, Tensor], most: int) -> None:
    headers = sum(len(name) + HEADER for name in stored)
    split = split_torch_state_dict_into_shards(stored, max_shard_size=max(most - headers, 1))
    for file, names in split.filename_to_tensors.items():
        save_file({name: stored[name] for name in names}, place / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (place / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
