"""Every message comes back as it was sent, however the bytes are cut; so do sampling parameters and step outputs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.backend import ModelInfo
from sparkdraft.core import FinishReason, GrammarSpec, SamplingParams, StepOutput, TokenLogprob, UserError
from sparkdraft.server import messages
from sparkdraft.server.messages import Lines, Message, decode, encode

text = st.text(st.characters(), max_size=20)  # new lines and all
number = st.integers(0, 2**31)
ids = st.lists(number, max_size=8)
chance = st.floats(allow_nan=False, max_value=0)  # minus infinity is one
plain = st.dictionaries(text, st.none() | number | text | st.lists(number, max_size=3), max_size=3)
logprob = st.builds(TokenLogprob, number, chance, st.lists(st.tuples(number, chance), max_size=3))
event = st.builds(
    StepOutput,
    text,
    number,
    ids,
    text,
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.lists(logprob, max_size=3),
    st.none() | st.lists(st.none() | logprob, max_size=3),
    number,
    number,
    number,
    st.none() | plain,
)
names = st.dictionaries(text, text, max_size=2)
info = st.builds(
    ModelInfo, text, text, number, number, text, plain, ids, st.none() | text, text, plain,
    st.lists(names, max_size=2), st.none() | plain, number,
)  # fmt: skip
message = st.one_of(
    st.builds(messages.Submit, text, ids, plain),
    st.builds(messages.Abort, text),
    st.builds(messages.AskStatus, text),
    st.builds(messages.Shutdown),
    st.builds(messages.Loading, text, number, number),
    st.builds(messages.Ready, info),
    st.builds(messages.Tokens, st.lists(event, max_size=3)),
    st.builds(messages.Refused, text, text),
    st.builds(messages.Status, text, plain),
    st.builds(messages.Dying, text, st.booleans()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(message, min_size=1, max_size=4), st.lists(st.integers(0, 400), max_size=5))
def test_round_trip_in_any_pieces(sent: list[Message], cuts: list[int]) -> None:
    assert [decode(encode(m)) for m in sent] == sent
    data = b"".join(map(encode, sent))
    assert data.count(b"\n") == len(sent)
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    lines = Lines()
    came = [m for low, high in pairwise(edges) for m in lines.feed(data[low:high])]
    assert came == sent


def test_types_survive() -> None:
    output = StepOutput("r", 1, [5, 6], "ab", FinishReason.STOP, [TokenLogprob(5, float("-inf"), [(5, -0.5)])])
    output.num_accepted, output.num_cached, output.speculation = 1, 16, {"num_spec_steps": 2}
    back = decode(encode(messages.Tokens([output])))
    assert isinstance(back, messages.Tokens)
    (came,) = back.events
    assert (came.request_id, came.index, came.ids, came.text) == ("r", 1, [5, 6], "ab")
    assert came.finish is FinishReason.STOP and came.logprobs == output.logprobs
    assert (came.num_cached, came.num_accepted, came.speculation) == (16, 1, {"num_spec_steps": 2})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            max_tokens=3, temperature=0.7, stop=["\n", "é"], seed=2**60, n=3, logit_bias={7: -100.0, 0: 1.5}
        ),
        SamplingParams(grammar=GrammarSpec("json_schema", '{"type": "object"}'), keep_special=True, logprobs=0),
    ],
)
def test_parameters_survive(params: SamplingParams) -> None:
    sent = decode(encode(messages.Submit("r", [1], messages.pack_params(params))))
    assert isinstance(sent, messages.Submit)
    assert messages.unpack_params(sent.params) == params


@pytest.mark.parametrize(
    "wrong", [{"heat": 1}, {"temperature": "hot"}, {"logit_bias": {"x": 1}}, {"grammar": {"a": 1}}]
)
def test_parameters_that_make_no_sense_are_refused_in_a_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        messages.unpack_params(wrong)
