"""A checkpoint: a config, named tensors, a tokenizer and a chat template, wherever they come from.

`open_checkpoint` turns a short name, a folder, a .gguf file or a hub id into one of two readers, safetensors.py or
gguf.py, which use Hugging Face's names for everything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.util.fields import read_json
from sparkdraft.util.names import did_you_mean, user_path
from sparkdraft.util.progress import progress
from sparkdraft.weights import hub
from sparkdraft.weights.hub import ALLOW, IGNORE, cached_snapshot, explained, fetch_config
from sparkdraft.weights.quant.stated import FILES, read_stated

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from sparkdraft.weights.plane_layout import StoredBytes
    from sparkdraft.weights.quant.stored import Stored

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Checkpoint(Protocol):
    path: Path
    config: dict[str, Any]  # as in config.json
    generation: dict[str, Any]  # as in generation_config.json, {} where there is none
    chat_template: str | None
    special: dict[str, Any]  # bos_token, eos_token, pad_token ... as text, for the chat template

    def names(self) -> list[str]:
        """Tensor names as Hugging Face writes them: model.layers.0.self_attn.q_proj.weight.

        A quantised matrix has this one name, however many tensors of the file it consists of.
        """

    def read(self, name: str) -> Stored:
        """Read one tensor or one quantised matrix, mapped from the file where possible. Treat it as read-only."""

    def stored_bytes(self, unread: tuple[str, ...] = ()) -> StoredBytes:
        """Count what the file holds, for the plan. unread: prefixes of names that will not be loaded."""

    def tokenizer_json(self) -> RawTokenizer:
        """The tokenizer, for the `tokenizers` library."""


def open_checkpoint(name: str) -> Checkpoint:
    """Open the first that fits: a known short name, a folder, a .gguf file, a hub id. Raises UserError if none does."""
    name = str(name)
    if name in hub.KNOWN:
        return _open_file(hub.fetch(name))
    path = user_path(name)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_file(path)
    if in_hub := _in_hub(name):
        return _open_hub(*in_hub)
    raise UserError(_unknown(name, path))


def check_name(name: str) -> None:
    """Raise UserError if the name stands for no model. Fetches at most the config.json of a hub id."""
    path = user_path(name)
    if name in hub.KNOWN or path.is_file():
        return
    if path.is_dir():
        _check_folder(path)
    elif not (in_hub := _in_hub(name)):
        raise UserError(_unknown(name, path))
    elif not in_hub[1] and not cached_snapshot(in_hub[0]):
        fetch_config(in_hub[0])


def _in_hub(name: str) -> tuple[str, str] | None:
    """The repository of a hub id, and the .gguf file that may follow it; None: the name is no hub id."""
    repo, _, file = name.partition(":")
    is_file = repo.endswith((".gguf", ".safetensors")) or (file and not file.endswith(".gguf"))
    return (repo, file) if HUB_ID.fullmatch(repo) and not is_file else None


def _unknown(name: str, path: Path) -> str:
    known = sorted(hub.KNOWN)
    if "/" in name or name.endswith((".gguf", ".safetensors")):
        return f"There is no file or folder {path}: check the path, or use a known name ({', '.join(known)})."
    question = did_you_mean(name, known)
    return (
        f"Unknown model {name!r}{f'; {question}' if question else '.'} Known names are {', '.join(known)}; "
        "a folder, a .gguf file or a hub id such as org/name works too."
    )


def _open_file(path: Path) -> Checkpoint:
    from sparkdraft.weights.gguf import MAGIC, GgufCheckpoint

    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == MAGIC:
        return GgufCheckpoint(path)
    raise UserError(
        f"{path} is not a GGUF file: pass a .gguf file, or the folder that holds config.json and safetensors."
    )


def _open_folder(path: Path) -> Checkpoint:
    _check_folder(path)
    from sparkdraft.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _check_folder(path: Path) -> None:
    if (path / "config.json").is_file():
        return
    files = sorted(path.glob("*.gguf"))
    if files:
        raise UserError(
            f"The folder {path} has no config.json but holds GGUF files: pass one of them, such as {files[0]}."
        )
    raise UserError(
        f"The folder {path} has no config.json: pass a model folder in the Hugging Face layout, or a .gguf file."
    )


def read_config_json(name: str) -> dict[str, Any]:
    """Read the config.json of a folder, the file itself, a .gguf file (by translating its header) or a hub id. Adds
    what files beside it say of quantised matrices."""
    path = user_path(name)
    if path.suffix == ".gguf" or name in hub.KNOWN:
        return open_checkpoint(name).config
    if not path.exists() and HUB_ID.fullmatch(name) and not name.endswith((".json", ".safetensors")):
        path = fetch_config(name, [*FILES])
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise UserError(_unknown(name, path))
    config = read_json(path)
    beside = {file: read_json(path.with_name(file)) for file in FILES if path.with_name(file).is_file()}
    stated = read_stated(path.parent, config, beside) if beside else None
    return config | {"quantization_config": stated.said} if stated else config


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder, from the headers of its safetensors files. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                names += file.keys()
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"The safetensors file {path} is damaged or incomplete ({error}): fetch it again."
            ) from error
    return names


def _open_hub(repo: str, file: str) -> Checkpoint:
    """From the hub, or from its local cache when the hub cannot be reached."""
    from huggingface_hub import hf_hub_download, snapshot_download

    # is_drawn=False: the hub library draws its own bars
    with explained(repo), progress(f"fetching {repo} from the hub", is_drawn=False):
        if file:
            path = hf_hub_download(repo, file)
        else:
            path = snapshot_download(repo, allow_patterns=ALLOW, ignore_patterns=IGNORE)
        return _open_file(Path(path)) if file else _open_folder(Path(path))
