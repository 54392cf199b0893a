"""Checkpoints in the Hugging Face layout: config.json, safetensors (one file or shards) and tokenizer.json.

Every tensor is a view of the mapped file. A quantised matrix is several tensors, which weights/quant finds and reads;
it has one name here, X.weight. Pickle files are never opened.
"""

from __future__ import annotations

import json
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparkdraft.core import UserError
from sparkdraft.util.fields import mapping, read_chat_template, read_json
from sparkdraft.weights.plane_layout import StoredBytes, StoredMatrix, count_stored
from sparkdraft.weights.quant.base import Unread
from sparkdraft.weights.quant.formats import check_config, check_matrix, find_matrices, unused_tensors
from sparkdraft.weights.quant.stated import FILES, NOTHING, Said
from sparkdraft.weights.quant.stored import Stored, as_float

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from sparkdraft.weights.checkpoint import Checkpoint


INDEX = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 2 * 2**30
TOKENIZER = "PreTrainedTokenizerFast"  # the class that runs a tokenizer.json as it is
HEAD = "lm_head.weight"
HEADS = (HEAD, "language_model.lm_head.weight")  # the second in older multimodal files
EMBEDDINGS = tuple(f"{at}embed_tokens.weight" for at in ("model.", "model.language_model.", "language_model.model."))
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class SafetensorsFile:
    """One file. The library checks the header against the file at once, and maps the bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"The safetensors file {path} is damaged or incomplete ({error}): fetch it again."
            ) from error
        self.entries = frozenset(self._handle.keys())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor

    def dtype(self, name: str) -> str:
        """As safetensors spells it: BF16, F8_E4M3, I8 ..."""
        return str(self._handle.get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())


class SafetensorsCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        self.generation: dict[str, Any] = read_json(path / "generation_config.json", optional=True)
        self._stated = check_config(path, self.config, {f: read_json(path / f) for f in FILES if (path / f).is_file()})
        self._files = _open_shards(path)
        dtypes = {name: file.dtype(name) for name, file in self._files.items()}
        self._matrices = find_matrices(path, dtypes)
        self._unused = unused_tensors(dtypes, self._matrices)
        if self._has_own_head():
            self.config |= _untied(self.config)
        tokenizer_config = read_json(path / "tokenizer_config.json", optional=True)
        self.special = _special(tokenizer_config, read_json(path / "special_tokens_map.json", optional=True))
        self.chat_template = read_chat_template(path)

    def names(self) -> list[str]:
        parts = {tensor for matrix in self._matrices.values() for tensor in matrix.tensors} | self._unused
        return [*(name for name in self._files if name not in parts), *self._matrices]

    def read(self, name: str) -> Stored:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._tensor(name)
        what, said = f"{self.path}: {name}", self._said(name)
        read = matrix.format.read(what, *map(self._tensor, matrix.tensors), said=said)
        check_matrix(what, read, said)
        return read

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        text = mapping(self.config, "text_config") or self.config
        tied = bool(text.get("tie_word_embeddings")) and HEAD not in self._matrices
        names = (name for name in self.names() if not name.startswith(unread) and not (tied and name == HEAD))
        return count_stored(map(self._stored, names), tied)

    def _has_own_head(self) -> bool:
        """True if the file has a head of floats that differs from its embedding: it is used whatever the config says,
        as in transformers. A quantised head is always used."""
        stored = self._files.keys() | self._matrices.keys()
        head, table = (next((name for name in names if name in stored), "") for names in (HEADS, EMBEDDINGS))
        if not head or not table or head in self._matrices or _untied(self.config).items() <= self.config.items():
            return False
        if table in self._matrices:
            return True
        own, embedding = self._tensor(head), self._tensor(table)
        if own.dtype != embedding.dtype:
            own, embedding = own.float(), embedding.float()
        return not (torch.equal(own[:16], embedding[:16]) and torch.equal(own, embedding))

    def _stored(self, name: str) -> StoredMatrix:
        matrix = self._matrices.get(name)
        if matrix is None:
            return StoredMatrix(name, prod(self._files[name].shape(name)), 1)
        try:
            unread = [
                Unread(self._files[each].shape(each), self._files[each].dtype(each), partial(self._tensor, each))
                for each in matrix.tensors
            ]
            return StoredMatrix(name, *matrix.format.size(*unread, said=self._said(name)))
        except (UserError, KeyError, IndexError, ValueError, ZeroDivisionError):
            return StoredMatrix(name, 0, 1)  # something is missing or has a wrong shape: `read` says what

    def _said(self, name: str) -> Said:
        return self._stated.of(name.removesuffix(".weight")) if self._stated else NOTHING

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise UserError(f"The checkpoint {self.path} has no tensor {name}: is config.json that of these weights?")
        return self._files[name].read(name)

    def tokenizer_json(self) -> RawTokenizer:
        from tokenizers import Tokenizer as RawTokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"The folder {self.path} has no tokenizer.json: save the model's fast tokenizer there.")
        try:
            return RawTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"The tokenizer {file} cannot be read ({error}): fetch it again.") from error


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that say that head and embedding are two matrices."""
    inner, own = config.get("text_config"), {"tie_word_embeddings": False}
    return own | ({"text_config": inner | own} if isinstance(inner, dict) else {})


def _open_shards(path: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it. The index, where there is one, must agree with the shards."""
    if (path / INDEX).is_file():
        return _open_index(path, read_json(path / INDEX, unique=True))
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    if not files:
        pickles = sorted(p.name for ext in ("bin", "pt", "pth") for p in path.glob(f"*.{ext}"))
        if pickles:
            raise UserError(
                f"The folder {path} holds its weights as pickles only ({pickles[0]}), which are never opened because "
                "they can run code: convert them to safetensors."
            )
        raise UserError(f"The folder {path} holds no .safetensors file: fetch the weights again.")
    return _by_name(map(SafetensorsFile, files))


def _open_index(path: Path, index: dict[str, Any]) -> dict[str, SafetensorsFile]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise UserError(f"{path / INDEX} has no weight_map of names and files: fetch it again.")
    shards: dict[str, SafetensorsFile] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            raise UserError(f"{path / INDEX} names {file!r}, which is not a file of its own folder: fetch it again.")
        if not (path / file).is_file():
            raise UserError(f"The shard {file} that {path / INDEX} lists is missing: fetch the weights again.")
        shards[file] = SafetensorsFile(path / file)
    found = _by_name(shards.values())
    for name, file in where.items():
        if name not in shards[file].entries:
            raise UserError(f"{path / INDEX} says that {name} is in {file}, but it is not: fetch the weights again.")
    return found


def _by_name(shards: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    found: dict[str, SafetensorsFile] = {}
    for shard in shards:
        for name in shard.entries:
            if name in found:
                both = f"{found[name].path} and {shard.path}"
                raise UserError(f"The tensor {name} is in both {both}: remove the file that is left over.")
            found[name] = shard
    return found


def _special(*sources: dict[str, Any]) -> dict[str, str]:
    """Special tokens as text; each is a string or an object with `content`."""
    special: dict[str, str] = {}
    for source in sources:
        for key in SPECIAL:
            value = source.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special.setdefault(key, text)
    return special


def write_checkpoint(
    source: Checkpoint,
    folder: Path,
    dtype: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write any checkpoint as a folder of floats in the Hugging Face layout, for programs that read nothing else.

    Memory holds one output file's worth. The folder appears whole or not at all. dtype: of DTYPES.
    """
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
    """Write files of about `most` bytes, which get their final names once their number is known."""
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


def follow_umask(place: Path) -> None:
    """Give every file of a folder the mode of a new file: libraries make some readable by their owner only."""
    usual = (place / "config.json").stat().st_mode  # written by Python, so it follows the umask
    for file in place.iterdir():
        file.chmod(stat.S_IMODE(usual))
