"""Sums of memory, made before anything is loaded: weights, KV cache, and the scratch memory of a step.

Integers in, integers and a table out. What does not fit is refused here, with the sums. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sparkdraft.drafters.base import DrafterCaps
from sparkdraft.models.common.config import ModelConfig
from sparkdraft.models.common.layers import RopeSpec
from sparkdraft.models.common.sizes import model_sizes
from sparkdraft.weights.plane_layout import StoredBytes


class Graphs(NamedTuple):
    most: int  # kept per kind of step (engine/graphs.py), beside the few made at start
    bytes_each: int = 0  # of a layer's native calls and their arguments, an estimate
    room: int = 0  # bytes that a GPU's graphs of one kind may hold, as each is counted when it is captured


FILLED = 0.9  # of the memory of native compiled steps, which is taken in pieces
RING = 16  # plain steps of a GPU after which the drafter observes their rows
GRAPHS = {"native": Graphs(256, bytes_each=2_000), "cuda": Graphs(64, room=64 << 20)}  # per kernels' name


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights: int  # bytes
    kv: int
    scratch: int
    free: int
    pages: int = 0  # for uncoded tokens and for windows
    graphs: int = 0  # or native compiled steps
    states: int = 0  # of recurrent layers: those of requests, and those of prefixes

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.pages + self.scratch + self.graphs + self.states

    @property
    def parts(self) -> dict[str, int]:
        rows = {
            "weights": self.weights,
            "KV cache": self.kv,
            "pages": self.pages,
            "recurrent states": self.states,
            "a step's scratch": self.scratch,
            "recorded steps": self.graphs,
        }
        return {name: size for name, size in rows.items() if size}

    def table(self) -> str:
        lines = [f"  {name:<18}{size / 2**30:8.2f} GiB" for name, size in self.parts.items()]
        return "\n".join([*lines, f"  {'together':<18}{self.total / 2**30:8.2f} GiB of {self.free / 2**30:.2f} free"])

    def refusal(self, fraction: float) -> str:
        """Says why a model leaves no room for K/V, with the sums, the largest first."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        taken = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts)
        usable = f"{self.free * fraction / 2**30:.1f} GiB of the {self.free / 2**30:.1f} that are free may be used"
        return f"the model does not fit: {usable}, and it takes {self.total / 2**30:.1f} without K/V ({taken})"


def weight_bytes(model: ModelConfig, itemsize: float, stored: StoredBytes | None = None, more: int = 0) -> int:
    """Bytes of the matrices as they are kept. An embedding that is not the head counts separately. stored: of the file,
    where kernels keep quantised matrices as they are. more: weights of a drafter in the same file, which `stored`
    counts too."""
    as_floats = int((model_sizes(model).held + more) * itemsize)
    return as_floats if stored is None else min(as_floats, stored.kept(itemsize))


def rope_bytes(model: ModelConfig, context: int) -> int:
    """Bytes of the tables of cosines and sines: float32, one per kind of RoPE that layers have."""
    kinds: list[RopeSpec] = []
    for spec in model.attention:
        if spec.rope not in kinds:
            kinds.append(spec.rope)
    return sum(4 * context * rope.width for rope in kinds)


def graph_bytes(
    kernels: str, model: ModelConfig, max_step_tokens: int, max_seqs: int, draft: DrafterCaps | None = None
) -> int:
    """Bytes of graphs if each kind holds as much as it may: the target's steps, and a drafter's passes that propose and
    that observe; on a GPU whole steps, the first halves of steps with and without prompts, and what a drafter observes.

    Native compiled steps have memory of their own: the largest of each kind is counted with all that its layers write,
    none of which is used again within a step. A GPU's graphs share a step's scratch.
    """
    limits = GRAPHS[kernels]
    if kernels != "native":
        return (3 + (draft is not None)) * limits.room
    sizes, rows = model_sizes(model), min(max_seqs * (1 + (draft.max_depth if draft else 0)), max_step_tokens)
    widths = [2 * sizes.hidden + layer.projected + layer.mixed + layer.mlp for layer in sizes.layers]
    numbers, layers = sum(widths) + model.vocab_size, len(widths)
    if draft:
        layers += 2 * len(draft.kv)
        numbers += len(draft.kv) * max(widths) + (draft.num_ids or model.vocab_size)
    return limits.most * limits.bytes_each * layers + int(4 * rows * numbers / FILLED)


def scratch_bytes(model: ModelConfig, max_step_tokens: int, itemsize: int, draft: DrafterCaps | None = None) -> int:
    """Bytes of a step's scratch: a layer's activations, and what a drafter reads of them. All activations of a layer
    are counted, because the allocator keeps their memory."""
    sizes = model_sizes(model)
    width = 2 * sizes.hidden + sizes.projected + sizes.mixed + sizes.mlp
    if draft:
        width += len(draft.aux_layers) * model.hidden_size
    return max_step_tokens * width * itemsize


def request_bytes(
    model: ModelConfig, context: int, block_size: int, itemsize: int, kernels: str, draft: DrafterCaps | None = None
) -> int:
    """Bytes that each request at once adds to a step's scratch: the logits of its tokens and the counts of ids by which
    penalties edit them (engine/sampler.py), and what a GPU keeps of it (engine/slots.py): its text, its block table,
    and the hidden states that a drafter has not observed.

    Logits are counted twice on a GPU, where a step runs once before it is captured; native compiled steps have logits
    of their own.
    """
    drafts = draft.max_depth if draft else 0
    rows = 4 + (3 if kernels == "cuda" else 1) * drafts  # log-probabilities keep the raw logits of drafts too
    sampled = 4 * rows * model.vocab_size
    if kernels != "cuda":
        return sampled
    hidden = RING * len(draft.aux_layers) * model.hidden_size * itemsize if draft else 0
    return sampled + 4 * (context + -(-context // block_size)) + hidden
