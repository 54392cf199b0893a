"""Muon for the matrices, AdamW for the rest: one object with named state, so that a checkpoint is plain tensors.

Muon steps by the orthogonal factor of each matrix's momentum, found by five Newton-Schulz iterations. Matrices of one
shape are stacked and iterated together: the iterations are small, and launching them one by one would take longer than
the training step. The caller sets the learning rates, step by step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, from Muon's authors
ITERATIONS = 5
MOMENTUM = 0.95


def orthogonal(stack: Tensor) -> Tensor:
    """The nearest matrices with singular values near 1, for a stack [count, rows, columns]."""
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(stack.dtype)


class Optimizer:
    def __init__(self, model: nn.Module, lr: float, vector_lr: float) -> None:
        """lr: of Muon. vector_lr: of AdamW."""
        named = dict(model.named_parameters())
        self.matrices = {n: p for n, p in named.items() if p.dim() == 2}
        self.vectors = {n: p for n, p in named.items() if p.dim() != 2}
        self.peaks = {"matrices": lr, "vectors": vector_lr}
        self.buffers = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        device = next(iter(named.values())).device
        # Rates are tensors, so that a captured step reads what the caller set.
        self.rates = {name: torch.zeros((), device=device) for name in self.peaks}
        gpu = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [*self.vectors.values()],
            self.rates["vectors"],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            capturable=gpu,
            foreach=gpu,
        )

    def set_rate(self, share: float) -> None:
        """Set the share of the peak learning rates, for the steps that follow."""
        for name, rate in self.rates.items():
            rate.fill_(self.peaks[name] * share)

    def step(self) -> None:
        """One update; clears the gradients."""
        self.adam.step()
        self._muon_step()
        for parameter in (*self.matrices.values(), *self.vectors.values()):
            parameter.grad = None

    @torch.no_grad()
    def _muon_step(self) -> None:
        shapes: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in self.matrices.items():
            if parameter.grad is not None:
                shapes[parameter.shape].append(name)
        for shape, names in shapes.items():
            grads = [g for n in names if (g := self.matrices[n].grad) is not None]
            buffers = [self.buffers[n] for n in names]
            torch._foreach_lerp_(buffers, grads, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(grads, buffers, MOMENTUM)  # Nesterov
            size = self.rates["matrices"] * max(1.0, shape[0] / shape[1]) ** 0.5
            updates = orthogonal(torch.stack(list(ahead))) * size
            torch._foreach_sub_([self.matrices[n] for n in names], list(updates.unbind(0)))

    # ---- the state as named tensors

    def state(self) -> dict[str, Tensor]:
        out = {f"muon.{n}": t for n, t in self.buffers.items()}
        for name, parameter in self.vectors.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                out[f"adam.{key}.{name}"] = value
        return out

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(tensors[f"muon.{name}"])
        for name, parameter in self.vectors.items():
            kept = {key: tensors.get(f"adam.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            self.adam.state[parameter] = {
                key: value.to(parameter.device).clone() for key, value in kept.items() if value is not None
            }
