"""The plugin without vLLM: its patch, which waits for its module, and the depths for another engine's steps."""

from __future__ import annotations

import importlib
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdraft.bridges.vllm import plugin
from sparkdraft.bridges.vllm.plugin.depth_steps import DepthSteps
from sparkdraft.bridges.vllm.plugin.patches import (
    APPLIED,
    FAILED,
    NAME,
    NOT_NEEDED,
    SKIPPED,
    WAITING,
    DoesNotApply,
    Patch,
    apply,
)


@pytest.fixture(autouse=True)
def finders() -> Iterator[None]:
    """Whatever a test binds does not stay bound."""
    kept = list(sys.meta_path)
    yield
    sys.meta_path[:] = kept


@pytest.mark.parametrize(
    ("version", "skip", "state"),
    [
        ("0.19.1", "", NOT_NEEDED),
        ("0.19.2rc1.dev21+g893611813", "", NOT_NEEDED),
        ("0.20.2", "", WAITING),
        ("0.32.0+cpu", "", WAITING),
        ("0.32.0", f"other, {NAME}", SKIPPED),
        ("", "", FAILED),
    ],
)
def test_versions_that_need_the_patch(version: str, skip: str, state: str) -> None:
    said: list[str] = []
    assert Patch(version, skip, said.append).state == state
    assert bool(said) == (state == FAILED) and ("is not a version" in "".join(said)) == bool(said)


RIGHT = """
class AttentionCGSupport:
    UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE = 2, 1


class TurboQuantMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self):
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
"""


def test_the_patch_waits_for_its_module_and_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "patched_right.py").write_text(RIGHT)
    (tmp_path / "patched_wrong.py").write_text("")
    said: list[str] = []
    before = list(sys.meta_path)
    Patch("0.19.2", "", said.append, "patched_right").bind()
    assert sys.meta_path == before, "a version that needs nothing is left alone"
    patch, wrong = (Patch("0.20.2", "", said.append, name) for name in ("patched_right", "patched_wrong"))
    patch.bind()
    wrong.bind()
    assert patch.state == WAITING and "patched_right" not in sys.modules and not said
    module = importlib.import_module("patched_right")
    assert module.TurboQuantMetadataBuilder._cudagraph_support == 1 and patch.state == APPLIED
    assert importlib.reload(module).TurboQuantMetadataBuilder._cudagraph_support == 2, "it is applied once"
    importlib.import_module("patched_wrong")
    assert wrong.state == FAILED and "does not apply to vLLM 0.20.2" in said[-1] and sys.meta_path == before
    late = Patch("0.20.2", "", said.append, "patched_right")
    late.bind()  # the module is loaded
    assert late.state == APPLIED


def test_register_is_called_again_without_harm(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(plugin, "_patch", None)
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.32.0+cpu")
    monkeypatch.setenv(plugin.SKIP, NAME)
    assert plugin.states() == {}
    with caplog.at_level(logging.WARNING):
        plugin.register()
        first = plugin._patch
        plugin.register()
    assert plugin._patch is first and plugin.states() == {NAME: SKIPPED} and not caplog.records


def _refused(module: Any) -> str:
    with pytest.raises(DoesNotApply) as error:
        apply(module)
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
    apply(module)
    assert _Builder._cudagraph_support == _Support.UNIFORM_SINGLE_TOKEN_DECODE
    assert "no graphs are captured of such batches" in _refused(module)
    module.TurboQuantMetadataBuilder = _Support
    assert "handled as decoding" in _refused(module)


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
