"""MTP heads for the tiny Qwen targets, written into their own files, and what transformers' layers make of them.

The oracle joins transformers' own decoder layer and norms in the published order: the embedding of the next id first,
the target's state after its final norm second. Its mistakes are named, so that a test can make each on purpose.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.tiny import oracle, write_tiny

VARIANTS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FILE = "model-of-the-head.safetensors"


class Mtp(nn.Module):
    def __init__(self, config: Any, layer: Any, norm: Any) -> None:
        super().__init__()
        own = copy.deepcopy(config)
        own.num_hidden_layers, own.layer_types, own._attn_implementation = 1, ["full_attention"], "eager"
        if hasattr(own, "mlp_only_layers"):
            own.mlp_only_layers = []
        size, eps = own.hidden_size, own.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps) for _ in range(3))
        self.fc, self.layers = nn.Linear(2 * size, size, bias=False), nn.ModuleList([layer(own, 0)])

    def forward(self, embeds: Tensor, hidden: Tensor, rope: Any, mask: Tensor, hidden_first: bool = False) -> Tensor:
        """[1, rows, hidden]: after the head's norm."""
        parts = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(parts[::-1] if hidden_first else parts, -1))
        out = self.layers[0](x, position_embeddings=rope, attention_mask=mask)
        after: Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return after


def text_model(model: Any) -> Any:
    """The part of a target that has the layers."""
    return getattr(model.model, "language_model", model.model)


def random_head(folder: Path) -> Mtp:
    """A head for the target in a folder, with every number moved from where it is at birth."""
    import transformers.models as families

    target = text_model(oracle(folder))
    kind = type(target).__name__.removesuffix("TextModel").removesuffix("Model")  # Qwen3_5, Qwen3_5Moe, Qwen3Next
    module = {"Qwen3_5": families.qwen3_5, "Qwen3_5Moe": families.qwen3_5_moe, "Qwen3Next": families.qwen3_next}[kind]
    parts = getattr(module, f"modeling_{module.__name__.split('.')[-1]}")
    head = Mtp(target.config, getattr(parts, f"{kind}DecoderLayer"), getattr(parts, f"{kind}RMSNorm"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + noise * 0.1 if parameter.ndim <= 1 else noise * 0.15)
    return head.float().eval()


def head_tensors(head: Mtp, prefix: str = "mtp.") -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.clone() for name, tensor in head.state_dict().items()}


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Put tensors into a checkpoint, in a file of their own."""
    save_file(tensors, folder / FILE)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    kept = {name: file for name, file in listed["weight_map"].items() if file != FILE}
    listed["weight_map"] = kept | dict.fromkeys(tensors, FILE)
    index.write_text(json.dumps(listed))
    return folder


def write_target(folder: Path, variant: str, **changes: Any) -> tuple[Path, Mtp]:
    """A target with a random head in its file, and that head."""
    write_tiny(folder, variant, **changes)
    head = random_head(folder)
    return add_tensors(folder, head_tensors(head)), head


def fit_head(folder: Path, head: Mtp, texts: list[list[int]], first: int) -> None:
    """Change a head so that its first drafts within these texts are often right: its layer adds little, and the rest is
    the least squares from (id p + 1, state p) to the target's state p + 1, over rows from position 'first' on."""
    model = oracle(folder)
    with torch.no_grad():
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_expert.down_proj.weight"):
            if name in (own := dict(head.layers[0].named_parameters())):
                own[name].mul_(0.003)
        for name, parameter in head.layers[0].named_parameters():
            if "experts" in name and "down" in name and "shared" not in name:
                parameter.mul_(0.003)
        ids = torch.tensor(texts)
        hidden = text_model(model)(ids).last_hidden_state
        rows = torch.cat(
            (
                head.pre_fc_norm_embedding(model.get_input_embeddings()(ids[:, 1:])),
                head.pre_fc_norm_hidden(hidden)[:, :-1],
            ),
            -1,
        )
        gain = 1 + head.norm.weight
        wanted = hidden[:, 1:] / gain  # the head's norm comes after
        given, following = (x[:, first:].flatten(0, 1).double() for x in (rows, wanted))
        head.fc.weight.copy_(torch.linalg.lstsq(given, following, driver="gelsd").solution.float().t())
    add_tensors(folder, head_tensors(head))


@cache
@torch.no_grad()
def target_states(folder: Path, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """[1, rows, hidden]: the target's last states after its final norm, and before."""
    text, before = text_model(oracle(folder)), list[Tensor]()
    hook = text.norm.register_forward_hook(lambda module, inputs, out: before.append(inputs[0]))
    after = text(torch.tensor([ids])).last_hidden_state
    hook.remove()
    return after, before[0]


@torch.no_grad()
def expected_drafts(
    folder: Path, head: Mtp, text: list[int], length: int, drafts: list[int], mistake: str = ""
) -> Tensor:
    """Logits [1 + len(drafts), vocab] of the drafts that follow the first 'length' ids of a text, if these drafts were
    picked: the whole sequence at once, without any cache.

    mistake: "hidden first", "before the norm", "the same id" or "a later position".
    """
    model, rotary = oracle(folder), text_model(oracle(folder)).rotary_emb
    streams = 3 if "mrope_section" in rotary.config.rope_parameters else 1  # of positions: for pictures, but equal here
    hidden = target_states(folder, tuple(text))[mistake == "before the norm"][:, : length - 1]
    following = torch.tensor([text[: length - 1] if mistake == "the same id" else text[1:length]])
    states = []
    for draft in [*drafts, None]:
        count = following.shape[1]
        # A rotation is relative: to move all rows by one would change nothing. The last row alone is moved.
        positions = torch.arange(count) + (torch.arange(count) == count - 1) * (mistake == "a later position")
        embeds = model.get_input_embeddings()(following)
        rope = rotary(embeds, positions.expand(streams, 1, -1) if streams > 1 else positions[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        states.append(head(embeds, hidden, rope, mask, mistake == "hidden first")[:, -1:])
        hidden = torch.cat((hidden, states[-1]), 1)
        if draft is not None:
            following = torch.cat((following, torch.tensor([[draft]])), 1)
    logits: Tensor = model.lm_head(torch.cat(states, 1)[0])
    return logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Of the head."""
    return load_file(folder / FILE)
