"""Every wrong parameter is refused by one sentence that names it and its limit."""

from __future__ import annotations

import pytest

from sparkdraft.config import EngineConfig
from sparkdraft.core import Request, SamplingParams, UserError


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"logit_bias": {1: 500}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9"),
        ({"stop": [""]}, "stop string is empty"),
        ({"logprobs": 99}, "logprobs is 99"),
        ({"n": 0}, "n is 0"),
        ({"n": 2**70}, "n is 1180591620717411303424"),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648"),
        ({"temperature": 1e30}, "temperature is 1e"),
        ({"top_k": 2**63}, "top_k is 9223372036854775808; it must be 0 .off. or a positive number up to 2147483647"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty is 1e-30; it must be between 0.01 and 100"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias has a value outside"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 entries and 1024 is the limit"),
        ({"stop": ["x"] * 17}, "stop has 17 entries and 16 is the limit"),
        ({"stop": ["x" * 257]}, "stop has a string of 257 characters"),
        ({"stop_ids": [1] * 65}, "stop_ids has 65 entries"),
        ({"num_draft": 2**70}, "num_draft is"),
    ],
)
def test_wrong_sampling_parameters(params: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [{"device": "tpu"}, {"dtype": "int3"}, {"max_seqs": -1}, {"memory_fraction": 0.0}, {"block_size": 12}],
)
def test_wrong_engine_options(field: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        EngineConfig(**field)  # type: ignore[arg-type]


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_ids_across_the_border_of_prompt_and_output() -> None:
    made = Request("r", 0, [1, 2, 3], SamplingParams(), 0, 10)
    made.output_ids = [4, 5, 6]
    everything = [1, 2, 3, 4, 5, 6]
    for start in range(7):
        for stop in range(start, 7):
            assert made.ids(start, stop) == everything[start:stop]
