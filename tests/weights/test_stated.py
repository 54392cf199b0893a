"""What a config says of a matrix: of single modules by name, by the end of a name and by pattern, without reading the
whole config for each."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdraft.weights.quant.stated import Stated
from tests.fakes.counting import lines_run

EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"
    for layer in range(20)
    for expert in range(300)
    for matrix in ("gate_proj", "up_proj", "down_proj")
]
WEIGHTS = {"num_bits": 4, "type": "int"}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("compressed-tensors", {"config_groups": {"a": {"targets": EXPERTS, "weights": WEIGHTS}}}),
        ("modelopt", {"quantized_layers": {key: {"quant_algo": "NVFP4"} for key in EXPERTS}}),
        ("auto-round", {"bits": 8, "extra_config": {key: {"bits": 4} for key in EXPERTS}}),
    ],
)
def test_a_config_that_names_every_expert_is_read_in_a_moment(method: str, said: dict[str, Any]) -> None:
    found = set[int]()

    def read() -> None:
        stated = Stated({"quant_method": method, **said}, "config.json")
        found.update(stated.of(name).bits for name in EXPERTS)

    assert lines_run(read) < 100 * len(EXPERTS) and found == {4}  # as many as there are names, times a look at all


def test_auto_round_takes_the_name_then_its_longest_end_then_a_pattern() -> None:
    extra = {
        "down_proj": {"bits": 2},
        "mlp.down_proj": {"bits": 3},
        "model.layers.1.mlp.down_proj": {"bits": 5},
        r".*\.up_proj": {"bits": 8},
    }
    stated = Stated({"quant_method": "auto-round", "bits": 4, "extra_config": extra}, "config.json")
    names = (
        "layers.1.mlp.down_proj",
        "layers.2.mlp.down_proj",
        "layers.2.x.down_proj",
        "layers.2.up_proj",
        "layers.2.o",
    )
    assert [stated.of(f"model.{name}").bits for name in names] == [5, 3, 2, 8, 4]


def test_gptq_leaves_out_what_a_pattern_with_a_minus_names() -> None:
    dynamic = {r"-:.*\.gate$": {}, r"+:.*\.down_proj": {"bits": 8}}
    stated = Stated({"quant_method": "gptq", "bits": 4, "dynamic": dynamic}, "config.json")
    found = [stated.of(f"model.layers.0.mlp.{name}") for name in ("gate", "down_proj", "up_proj")]
    assert [(each.is_dense, each.bits) for each in found] == [(True, 4), (False, 8), (False, 4)]
