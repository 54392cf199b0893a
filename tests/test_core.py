"""Every wrong parameter is refused by one sentence that names it and its limit."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np
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
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
        ({"max_tokens": None}, "max_tokens is None; it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"stop": 5}, "stop is 5; it must be a text or a list of texts"),
        ({"stop": [5]}, "stop holds 5; it must be a text"),
        ({"stop_ids": 5}, "stop_ids is 5; it must be a list of token ids"),
        ({"stop_ids": ["a"]}, "a token id of stop_ids is 'a'; it must be a whole number"),
        ({"logit_bias": [1]}, "logit_bias is .1.; it must map token ids to numbers"),
        ({"logit_bias": {1: "high"}}, "logit_bias is 'high'; it must be a number"),
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


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"spec": 7.5}, "spec is 7.5; it must be a text"),
        ({"spec": -7}, "spec is '-7'; it must be auto, off or a number of drafts"),
        ({"spec_depths": [3, 0]}, "spec_depths is '3,0'; it must be auto, or growing numbers"),
        ({"max_seqs": 1.5}, "max_seqs is 1.5; it must be a whole number"),
        ({"memory_fraction": "all"}, "memory_fraction is 'all'; it must be a number"),
        ({"graphs": "no"}, "graphs is 'no'; it must be true or false"),
    ],
)
def test_engine_options_of_a_wrong_type(field: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        EngineConfig.of(**field)


def test_engine_options_as_python_writes_them() -> None:
    config = EngineConfig.of(model=PurePath("models", "mine"), spec=7, spec_depths=[0, 3, 7])
    assert (config.model, config.num_draft, config.depths) == (str(PurePath("models", "mine")), 7, [0, 3, 7])


def test_numbers_may_be_those_of_numpy_and_lists_may_be_none() -> None:
    made = SamplingParams(np.int64(5), seed=np.int64(3), temperature=np.float32(0.5), stop_ids=np.array([1, 2]))
    assert (made.max_tokens, made.seed, made.stop_ids) == (5, 3, [1, 2])
    assert {type(made.max_tokens), type(made.seed), *map(type, made.stop_ids)} == {int}
    none: Any = None
    assert SamplingParams(stop=none, stop_ids=none, logit_bias=none) == SamplingParams()


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_ids_across_the_border_of_prompt_and_output() -> None:
    made = Request("r", 0, [1, 2, 3], SamplingParams(), 0, 10)
    made.output_ids = [4, 5, 6]
    everything = [1, 2, 3, 4, 5, 6]
    for start in range(7):
        for stop in range(start, 7):
            assert made.ids(start, stop) == everything[start:stop]
