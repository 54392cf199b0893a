"""A checkpoint: a config, named tensors, a tokenizer and a chat template, wherever they come from.

`open_checkpoint` turns what a user typed (a short name, a folder, a .gguf file or a hub id) into one of two readers
that look the same from outside, with Hugging Face's names for everything. Reading the bytes is safetensors.py's and
gguf.py's work, fetching the embedded model hub.py's; what the tensors mean is known to the models alone.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sparkdraft.core import UserError
from sparkdraft.progress import progress
from sparkdraft.weights import hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from sparkdraft.weights.plane_layout import StoredBytes
    from sparkdraft.weights.quant.stored import Stored

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Only what we read: no pickles, no tensors of other frameworks, nothing from subfolders (onnx/, original/).
HUB_ALLOW = ["*.json", "*.safetensors", "*.jinja"]
HUB_IGNORE = ["*/*", "consolidated*"]


class Checkpoint(Protocol):
    path: Path
    config: dict[str, Any]  # as in config.json
    generation: dict[str, Any]  # as in generation_config.json, {} where there is none
    chat_template: str | None
    special: dict[str, Any]  # bos_token, eos_token, pad_token ... as text, for the chat template

    def names(self) -> list[str]:
        """Tensor names as Hugging Face writes them: model.layers.0.self_attn.q_proj.weight.

        A matrix of a quantised format has that one name, whatever tensors of the file it is made of.
        """

    def read(self, name: str) -> Stored:
        """One tensor, or one matrix in the format that it is stored in; mapped from the file where its layout allows.

        Treat it as read-only.
        """

    def stored_bytes(self) -> StoredBytes:
        """What the file holds, for the plan."""

    def tokenizer_json(self) -> RawTokenizer:
        """The tokenizer as the `tokenizers` library runs it."""


def open_checkpoint(name: str) -> Checkpoint:
    """The first that fits: a known short name, a folder, a .gguf file, a hub id. Raises UserError when none does."""
    name = str(name)
    if name in hub.KNOWN:
        return _open_file(hub.fetch(name))
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_file(path)
    repo, _, file = name.partition(":")
    if HUB_ID.fullmatch(repo) and (not file or file.endswith(".gguf")) and not repo.endswith((".gguf", ".safetensors")):
        return _open_hub(repo, file)
    raise UserError(_unknown(name, path))


def _unknown(name: str, path: Path) -> str:
    known = sorted(hub.KNOWN)
    if "/" in name or name.endswith((".gguf", ".safetensors")):
        return f"There is no file or folder {path}: check the path, or use a known name ({', '.join(known)})."
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"Unknown model {name!r}: {hint}Known names are {', '.join(known)}; "
        "a folder, a .gguf file or a hub id such as org/name work too."
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
    from sparkdraft.weights.safetensors import SafetensorsCheckpoint

    if (path / "config.json").is_file():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if files:
        raise UserError(
            f"The folder {path} has no config.json but holds GGUF files: pass one of them, such as {files[0]}."
        )
    raise UserError(
        f"The folder {path} has no config.json: pass a model folder in the Hugging Face layout, or a .gguf file."
    )


def _open_hub(repo: str, file: str) -> Checkpoint:
    """From the hub, or from its local cache when the hub cannot be reached."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with progress(f"fetching {repo} from the hub", is_drawn=False):  # that library draws bars of its own
            if file:
                path = hf_hub_download(repo, file)
            else:
                path = snapshot_download(repo, allow_patterns=HUB_ALLOW, ignore_patterns=HUB_IGNORE)
        return _open_file(Path(path)) if file else _open_folder(Path(path))
    except GatedRepoError as error:
        raise UserError(
            f"The hub model {repo} asks for a licence: accept it on its page, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"The hub has no model {repo} that you may read, and there is no such folder here: check the name."
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{repo} is neither a folder here nor in the local hub cache, and the hub cannot be reached: connect to a "
            f"network, or pass a folder, a .gguf file or a known name ({', '.join(sorted(hub.KNOWN))})."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        if error.errno in hub.FULL:
            raise UserError(
                f"The disk of the hub's cache is full, so {repo} cannot be fetched into {HF_HUB_CACHE}: free some "
                "space there, or set HF_HOME to a folder on another disk."
            ) from error
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"Fetching {repo} from the hub failed ({first[0]}): try again, or pass a local folder."
        ) from error
