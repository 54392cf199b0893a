"""The plugin's patches without vLLM: the versions that need them, that they wait for their module, and each of them
on a module like the broken one and on one like a fixed one. And the choice of depth over another engine's steps."""

from __future__ import annotations

import importlib
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparkdraft.bridges.vllm import plugin
from sparkdraft.bridges.vllm.plugin.depth_steps import DepthSteps, usual_depths
from sparkdraft.bridges.vllm.plugin.patches import (
    APPLIED,
    FAILED,
    NOT_NEEDED,
    PATCHES,
    SKIPPED,
    WAITING,
    DoesNotApply,
    DoesNotConcern,
    Patch,
    Patches,
)

TURBO, KEYS = (patch.name for patch in PATCHES)
BY_NAME = {patch.name: patch for patch in PATCHES}


@pytest.fixture(autouse=True)
def finders() -> Iterator[None]:
    """Whatever a test binds does not stay bound."""
    kept = list(sys.meta_path)
    yield
    sys.meta_path[:] = kept


@pytest.mark.parametrize(
    ("version", "needed"),
    [
        ("0.19.1", set()),
        ("0.19.2rc1.dev21+g893611813", set()),
        ("0.20.2", {TURBO}),
        ("0.24.0", {TURBO}),
        ("0.25.1", {TURBO, KEYS}),
        ("0.32.0+cpu", {TURBO, KEYS}),
    ],
)
def test_each_version_gets_the_patches_that_it_needs(version: str, needed: set[str]) -> None:
    said: list[str] = []
    patches = Patches(PATCHES, version, "", said.append)
    assert {name for name, state in patches.states.items() if state == WAITING} == needed and not said
    assert set(patches.states.values()) <= {WAITING, NOT_NEEDED}


def test_patches_are_left_out_by_name_and_a_wrong_name_is_reported() -> None:
    said: list[str] = []
    patches = Patches(PATCHES, "0.32.0", f" {TURBO} , gemma", said.append)
    assert patches.states == {TURBO: SKIPPED, KEYS: WAITING}
    assert len(said) == 1 and "no patch is named gemma; there are" in said[0] and KEYS in said[0]
    said.clear()
    assert set(Patches(PATCHES, "", "", said.append).states.values()) == {FAILED} and "is not a version" in said[0]


def _module(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    return name


def test_a_patch_waits_for_its_module_and_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong, right = (_module(tmp_path, f"patched_{word}", "WIDTH = 4\n") for word in ("wrong", "right"))

    def widen(module: ModuleType) -> None:
        module.WIDTH = 8  # type: ignore[attr-defined]

    def refuse(module: ModuleType) -> None:
        raise DoesNotApply("WIDTH is not what it was")

    def leave(module: ModuleType) -> None:
        raise DoesNotConcern

    said: list[str] = []
    other = Patches([Patch("leave", "another machine", "json", leave, "0.20", ())], "0.20.2", "", said.append)
    other.bind()  # its module is loaded
    assert other.states == {"leave": NOT_NEEDED} and not said
    all_of_it = [
        Patch("widen", "it is narrow", right, widen, "0.20", ()),
        Patch("refuse", "it is wide", wrong, refuse, "0.20", ()),
    ]
    older = Patches(all_of_it[:1], "0.19.2", "", said.append)
    before = list(sys.meta_path)
    older.bind()
    assert sys.meta_path == before and not said, "a version that needs nothing is left alone"
    patches = Patches(all_of_it, "0.20.2", "", said.append)
    patches.bind()
    assert set(patches.states.values()) == {WAITING} and right not in sys.modules and not said
    module = importlib.import_module(right)
    assert module.WIDTH == 8 and patches.states["widen"] == APPLIED
    assert type(module.__loader__).__name__ == "SourceFileLoader" and importlib.reload(module).WIDTH == 4
    assert importlib.import_module(wrong).WIDTH == 4 and patches.states["refuse"] == FAILED
    assert said[-1] == (
        "sparkdraft: the patch refuse does not apply to vLLM 0.20.2: WIDTH is not what it was; without it, it is wide"
    )
    late = Patches(all_of_it, "0.20.2", "", said.append)
    late.bind()  # both modules are loaded
    assert late.states == {"widen": APPLIED, "refuse": FAILED}


def test_register_is_called_again_without_harm(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(plugin, "_patches", None)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setenv(plugin.SKIP, TURBO)
    assert plugin.states() == {}
    with caplog.at_level(logging.WARNING):
        plugin.register()
        first = plugin._patches
        plugin.register()
    assert plugin._patches is first and plugin.states()[TURBO] == SKIPPED and not caplog.records


def _refused(name: str, module: Any) -> str:
    with pytest.raises(DoesNotApply) as error:
        BY_NAME[name].apply(module)
    return str(error.value)


class _Support:
    UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE = 2, 1


class _Builder:
    _cudagraph_support = _Support.UNIFORM_BATCH

    def __init__(self) -> None:
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)

    def _init_reorder_batch_threshold(self, count: int, supports_spec_as_decode: bool) -> None:
        pass


def test_verify_batches_get_no_graphs_with_turboquant() -> None:
    module: Any = SimpleNamespace(
        __name__="turboquant_attn", TurboQuantMetadataBuilder=_Builder, AttentionCGSupport=_Support
    )
    BY_NAME[TURBO].apply(module)
    assert _Builder._cudagraph_support == _Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert "no graphs are captured of such batches" in _refused(TURBO, module)
    module.TurboQuantMetadataBuilder = _Support
    assert "handled as decoding" in _refused(TURBO, module)


class _Keys:
    _rms_norm_eps = 1e-6

    def __init__(self, weights: torch.Tensor) -> None:
        self._k_norm_weights = weights

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_keys_are_normed_by_layer_on_a_cpu_whose_kernel_does_not() -> None:
    def rms_norm(out: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        scale = weights.reshape(-1, weights.shape[-1])[0]  # as the kernel for CPUs does
        out.copy_(keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + eps) * scale)

    def module(is_cpu: bool = True, norm: Any = rms_norm, model: Any = _Keys) -> Any:
        ops, platform = SimpleNamespace(rms_norm=norm), SimpleNamespace(is_cpu=lambda: is_cpu)
        found = {"current_platform": platform, "ops": ops, "torch": torch, "DFlashQwen3Model": model}
        return SimpleNamespace(__name__="qwen3_dflash", **found)

    def right(out: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        rms_norm(out, keys, torch.ones(keys.shape[-1]), eps)
        out *= weights[:, None, None]

    for other in (module(is_cpu=False), module(norm=right)):
        with pytest.raises(DoesNotConcern):
            BY_NAME[KEYS].apply(other)
    assert "not normalised by" in _refused(KEYS, module(model=object))
    BY_NAME[KEYS].apply(module())
    keys, weights = torch.randn(3, 4, 2, 16), torch.randn(3, 16)
    expected = torch.empty_like(keys)
    right(expected, keys, weights, 1e-6)
    assert torch.allclose(_Keys(weights)._normalize_context_k(keys), expected)


def steps_of(
    chance: float, steps: int = 300, num: int = 1, most: int = 15, row: float = 0.05
) -> tuple[list[int], float]:
    """Depths of the steps of 'num' requests whose drafts are accepted by chance, and the tokens a second. A draft costs
    'row' of a plain step."""
    noise, depths, now, tokens = random.Random(1), DepthSteps(most), 0.0, num
    seen: list[int] = []
    wanted = {f"r{i}": 0 for i in range(num)}
    for step in range(steps):
        wanted = depths.choose(dict.fromkeys(wanted, 100 + step))
        deepest = max(wanted.values())
        now += 1.0 + row * sum(wanted.values())
        for name, depth in wanted.items():
            accepted = next((i for i in range(depth) if noise.random() > chance), depth)
            depths.verified(name, depth, accepted)
            tokens += 1 + accepted
        depths.ended(now, [*wanted.values()], num, 100 + step, is_pure=True)
        seen.append(deepest)
    depths.finished(wanted)
    return seen, tokens / now


def test_the_depths_are_those_of_our_engine() -> None:
    assert usual_depths(15) == [0, 1, 3, 7, 15] and usual_depths(1) == [0, 1] and usual_depths(4) == [0, 1, 3, 4]


@pytest.mark.parametrize("num", [1, 3])
def test_easy_text_is_drafted_and_hard_text_is_not(num: int) -> None:
    easy, fast = steps_of(0.95, num=num)
    hard, slow = steps_of(0.02, num=num, row=0.3)
    assert sorted(easy)[len(easy) // 2] >= 7 and fast > 2.5 * num
    assert sum(depth > 0 for depth in hard) < len(hard) / 5 and slow > 0.93 * num, "pausing costs next to nothing"


def test_only_given_depths_are_chosen_and_odd_reports_do_no_harm() -> None:
    depths = DepthSteps(7, [7, 7, 2])
    for step in range(200):
        chosen = depths.choose({"a": 50 + step})
        assert chosen["a"] in (0, 2, 7)
        depths.verified("a", chosen["a"], chosen["a"])
        depths.verified("never chosen", 3, 1)
        depths.ended(step + 1.0, [chosen["a"]], 1, 50 + step, is_pure=step % 7 != 0)
    depths.idle()
    depths.ended(1000.0, [], 1, 10, is_pure=True)  # the pause before it is no step
    depths.ended(1000.0, [], 1, 10, is_pure=True)
    depths.ended(1000.5, [], 0, 0, is_pure=True)
    depths.finished(["a", "a", "unknown"])
    assert depths.choose({}) == {}
