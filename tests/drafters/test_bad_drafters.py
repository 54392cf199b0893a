"""Drafters that cannot be used, named on the command line: one sentence, a non-zero status and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.said import in_process
from tests.cli.test_cli import refused
from tests.drafters.tiny_drafter import body, random_tensors, write_drafter, zlab

OTHER = body(hidden_size=64)
DEEP = zlab(body(), inner={"target_layer_ids": [0, 3]})


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good drafter and bad ones."""
    root = tmp_path_factory.mktemp("drafters")
    write_drafter(root / "good", zlab(body()), random_tensors(body()))
    write_drafter(root / "other", zlab(OTHER), random_tensors(OTHER))
    write_drafter(root / "deep", DEEP, random_tensors(body()))
    write_drafter(root / "cut", zlab(body()), random_tensors(body()))
    shard = root / "cut" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5000])
    return root


def write(tiny: Path, drafter: Path, *args: str) -> list[str]:
    options = ("--dtype", "float32", "--max-tokens", "4", "--drafter", str(drafter))
    return ["generate", "--model", str(tiny), "--prompt", "hello", *options, *args]


def test_the_good_one_is_used(tiny: Path, drafters: Path) -> None:
    result = in_process(*write(tiny, drafters / "good", "--spec", "7"))
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other", "it has hidden size 64, the model 96"),
        ("deep", "it reads layer 3, the model has 3"),
        ("cut", "model.safetensors"),
        ("missing", "missing"),
    ],
)
def test_a_drafter_that_can_not_be_used_is_named(name: str, words: str, tiny: Path, drafters: Path) -> None:
    refused(in_process(*write(tiny, drafters / name)), words)


@pytest.mark.parametrize("depth", ["99", "banana", "-1"])
def test_a_depth_that_can_not_be_had_is_named(depth: str, tiny: Path, drafters: Path) -> None:
    refused(in_process(*write(tiny, drafters / "good", f"--spec={depth}")), depth)
