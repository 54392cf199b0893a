"""Noise is uniform, reproducible and shared: a drafter that adds it draws what the target draws."""

from __future__ import annotations

import pytest
import torch

from sparkdraft.kernels import native
from sparkdraft.kernels.noise import LARGEST, gumbel
from sparkdraft.kernels.ops import Draws

MANY = 20000
ZERO, COUNT = torch.zeros(MANY, dtype=torch.long), torch.arange(MANY)


def draw(
    scaled: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """The column that each row of logits over temperature draws."""
    columns = torch.arange(scaled.shape[1]) if ids is None else ids
    return (scaled + gumbel(seeds.unsqueeze(1), positions.unsqueeze(1), columns)).argmax(-1)


@pytest.mark.parametrize("which", ["seed", "position", "id"])
def test_noise_is_gumbels_and_neighbours_know_nothing_of_each_other(which: str) -> None:
    noise = gumbel(*(COUNT if name == which else ZERO + 5 for name in ("seed", "position", "id")))
    assert float(noise.max()) <= LARGEST
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, 20, 0, 1)
    assert float(((counts - MANY / 20) ** 2 / (MANY / 20)).sum()) < 60  # chi-square with 19 degrees, far tail
    assert abs(float(torch.corrcoef(torch.stack((uniform[:-1], uniform[1:])))[0, 1])) < 0.03


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = torch.bincount(draw(probs.log().expand(MANY // 4, 4), ZERO[: MANY // 4] + 3, COUNT[: MANY // 4]))
    expected = probs * (MANY // 4)
    assert float(((drawn - expected) ** 2 / expected).sum()) < 25  # three degrees, far tail


@pytest.mark.parametrize("width", [0.1, 3.0, 30.0])
def test_the_kernel_leaves_out_only_what_cannot_win(width: float) -> None:
    if reason := native.unavailable_reason():
        pytest.skip(reason)
    scaled = torch.randn(24, 5000, generator=torch.Generator().manual_seed(1)) * width
    scaled[:, 100:200] = float("-inf")
    seeds, positions, ids = COUNT[:24] * -31, COUNT[:24] + 7, torch.randperm(5000)
    drawn = draw(scaled, seeds, positions)
    unfiltered = torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 24).contiguous()
    draws = Draws(COUNT[:24].int(), positions.int(), unfiltered, torch.stack((ZERO[:24], seeds)))
    assert torch.equal(native.sample(scaled, draws), drawn)
    assert torch.equal(native.sample(scaled, draws, ids), draw(scaled, seeds, positions, ids))
    assert not ((drawn >= 100) & (drawn < 200)).any()


def test_near_distributions_draw_the_same_far_more_often_than_the_likeliest_id_comes() -> None:
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(4000, 50, generator=generator) * 1.5
    drafter = target + torch.randn(4000, 50, generator=generator) * 0.3
    drawn = draw(target, ZERO[:4000], COUNT[:4000])
    assert torch.equal(draw(target.clone(), ZERO[:4000], COUNT[:4000]), drawn), "the same logits draw the same"
    thrown = float((draw(drafter, ZERO[:4000], COUNT[:4000]) == drawn).float().mean())
    likeliest = float((drafter.argmax(-1) == drawn).float().mean())
    assert thrown > 0.75 and likeliest < 0.45, (thrown, likeliest)


def test_columns_may_stand_for_other_ids() -> None:
    scaled, ids = torch.randn(8, 300), torch.randperm(300)
    back = scaled[:, ids]  # column c holds id ids[c]
    assert torch.equal(ids[draw(back, ZERO[:8], COUNT[:8], ids)], draw(scaled, ZERO[:8], COUNT[:8]))
