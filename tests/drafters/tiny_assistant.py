"""Gemma 4 assistants for the tiny gemma4 target, which transformers writes itself.

`write_assistant` makes a random one, all of whose numbers matter: what it computes is compared with transformers.
`write_fitted` makes one whose first drafts are often right: W_pre is the least squares from (embedding of id p + 1,
hidden state p) to the target's next state over given texts, the head is the target's, and the layers add little.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import GEMMA4, SMALL, TYPES, oracle, shake

WIDE = SMALL["hidden_size"]  # of the target
TEXT: dict[str, Any] = {
    **SMALL, **GEMMA4, "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "layer_types": TYPES, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
}  # fmt: skip


def write_assistant(folder: Path, outer: dict[str, Any] | None = None, **text: Any) -> Path:
    model = _make({**TEXT, **text}, outer or {})
    shake(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(0.4)  # the scale of scores is 1
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def write_fitted(folder: Path, target: Path, texts: list[list[int]], first: int) -> Path:
    """Fitted to the rows of the texts from position 'first' on."""
    model = _make({**TEXT, "hidden_size": WIDE}, {})
    shake(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            parameter.fill_(0.01)  # of the stream, whose RMS is about 1
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(1.0)
    body = oracle(target).model.language_model
    ids = torch.tensor(texts)
    hidden = body(input_ids=ids).last_hidden_state  # after the final norm
    given = torch.cat((body.embed_tokens(ids[:, 1:]), hidden[:, :-1]), -1)[:, first:]
    wanted = _unit(hidden[:, 1:] / body.norm.weight)[:, first:]
    rows, results = (x.flatten(0, 1).double() for x in (given, wanted))
    solution = torch.linalg.lstsq(rows, results, driver="gelsd").solution
    model.pre_projection.weight.copy_(solution.float().t())
    model.post_projection.weight.copy_(torch.eye(WIDE))
    model.model.norm.weight.copy_(body.norm.weight)
    model.model.embed_tokens.weight.copy_(body.embed_tokens.weight)
    model.save_pretrained(folder)
    return folder


def _make(text: dict[str, Any], outer: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(5)
    options = {"backbone_hidden_size": WIDE, **outer}
    config = transformers.Gemma4AssistantConfig(text_config=text, **options)
    return transformers.Gemma4AssistantForCausalLM(config).float().eval()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
