"""Muon against torch's own, and a state that goes through a file."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sparkdraft.train.optimizer import Optimizer


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.tall = nn.Linear(24, 8, bias=False), nn.Linear(8, 24, bias=False)
        self.twin, self.norm = nn.Linear(24, 8, bias=False), nn.Parameter(torch.ones(8))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.wide(self.tall(x)) * self.norm + self.twin(self.tall(x))) ** 2).mean()


def train(model: Shapes, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        model.loss(x).backward()
        optimizer.set_rate(1.0)
        optimizer.step()


def test_muon_is_torchs_muon() -> None:
    ours, theirs = Shapes(), Shapes()
    optimizer = Optimizer(ours, lr=0.02, vector_lr=2e-3)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True)
    adam = torch.optim.AdamW([theirs.norm], lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        theirs.loss(x).backward()
        for each in (muon, adam):
            each.step()
            each.zero_grad()
    train(ours, optimizer, 0, 4)
    for start, mine, other in zip(Shapes().parameters(), ours.parameters(), theirs.parameters(), strict=True):
        apart = (mine - other).norm() / (other - start).norm()
        assert apart < 0.1, f"the ways went apart by {apart:.3f}"  # torch iterates in bfloat16


def test_the_state_is_enough_to_go_on() -> None:
    unbroken, first = Shapes(), Shapes()
    train(unbroken, Optimizer(unbroken, 0.02, 2e-3), 0, 6)
    optimizer = Optimizer(first, 0.02, 2e-3)
    train(first, optimizer, 0, 3)
    second = copy.deepcopy(first)
    resumed = Optimizer(second, 0.02, 2e-3)
    resumed.load({name: tensor.clone() for name, tensor in optimizer.state().items()})
    train(second, resumed, 3, 6)
    for mine, other in zip(second.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(mine, other)
