"""Writes any checkpoint that can be opened as a folder in the Hugging Face layout, for programs that read nothing else.

Quantised matrices become floats, tensor by tensor, so that memory holds one file's worth. The folder appears whole or
not at all.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.weights.checkpoint import Checkpoint
from sparkdraft.weights.folder_files import follow_umask
from sparkdraft.weights.quant.stored import as_float
from sparkdraft.weights.safetensors import INDEX

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 2 * 2**30
TOKENIZER = "PreTrainedTokenizerFast"  # the class that runs a tokenizer.json as it is


def write_checkpoint(
    source: Checkpoint,
    folder: Path,
    dtype: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """dtype: of DTYPES. Raises UserError, also where the result would not be the same model."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype is '{dtype}'; a checkpoint is written as {' or '.join(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: name another")
    if "rope_freqs" in source.names():
        raise UserError(f"{source.path} has its own RoPE frequencies, which config.json cannot say: use the original")
    place = folder.resolve().with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    try:
        place.mkdir(parents=True)
        _write_texts(source, place, dtype)
        _write_tensors(place, _floats(source, DTYPES[dtype], progress), shard_bytes)
        follow_umask(place)
        if folder.exists():
            folder.rmdir()
        place.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The checkpoint could not be written to {folder} ({error}): make room, or name another"
        ) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_texts(source: Checkpoint, place: Path, dtype: str) -> None:
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    files: dict[str, Any] = {"config.json": {**config, "dtype": dtype}}
    if source.generation:
        files["generation_config.json"] = source.generation | (
            {"do_sample": True} if "temperature" in source.generation else {}
        )
    limit = config.get("max_position_embeddings")
    files["tokenizer_config.json"] = {
        **source.special,
        "tokenizer_class": TOKENIZER,
        "clean_up_tokenization_spaces": False,
        **({"model_max_length": limit} if limit else {}),
    }
    for name, content in files.items():
        (place / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    source.tokenizer_json().save(str(place / "tokenizer.json"))
    if source.chat_template:
        (place / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")


def _floats(
    source: Checkpoint, dtype: torch.dtype, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    names = source.names()
    for done, name in enumerate(names, 1):
        yield name, as_float(source.read(name), dtype).contiguous()
        progress(done, len(names))


def _write_tensors(place: Path, tensors: Iterator[tuple[str, Tensor]], most: int) -> None:
    """Files of about 'most' bytes, named as the index wants them once their number is known."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        save_file(held, place / f"part-{len(shards)}", {"format": "pt"})
        shards.append(list(held))

    for name, tensor in tensors:
        if held and size + tensor.nbytes > most:
            write()
            held, size = {}, 0
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(shards) == 1:
        (place / "part-0").rename(place / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (place / f"part-{number}").rename(place / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (place / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
