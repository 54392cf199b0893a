"""What is typed wrongly gets one sentence that names what was probably meant; every verb has every engine flag."""

from __future__ import annotations

import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator

import pytest

from sparkdraft.cli.main import main, parser
from sparkdraft.cli.options import engine_options
from sparkdraft.config import ENGINE_FIELDS, EngineConfig
from sparkdraft.core import UserError
from sparkdraft.engine.machine import detect
from sparkdraft.util.this_machine import usable_cores


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("serve --dvice cpu", "sparkdraft serve: unknown flag --dvice: did you mean --device?"),
        ("generate --promt x", "unknown flag --promt: did you mean --prompt?"),
        ("chat --temp 0.3", "unknown flag --temp: did you mean --temperature?"),
        ("bench serve --concurency=4", "unknown flag --concurency: did you mean --concurrency?"),
        ("train data --ou x", "unknown flag --ou: did you mean --out?"),
        ("generate --prompt x --zzzzzz", "unknown flag --zzzzzz (see `sparkdraft generate --help`)"),
        ("serv", "there is no 'serv': did you mean serve?"),
        ("bench ofline", "there is no 'ofline': did you mean offline?"),
        ("xyzzy", "there is no 'xyzzy', only serve, demo"),
        ("--versoin", "unknown flag --versoin: did you mean --version?"),
        ("serve --port x", "argument --port: invalid int value: 'x'"),
        ("train data", "the following arguments are required: --out (see `sparkdraft train data --help`)"),
    ],
)
def test_mistyped(typed: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert answer in printed.err and printed.err.count("\n") == 1, printed.err


def test_spellings_of_vllm_name_the_same_fields() -> None:
    args = parser().parse_args(["serve", "--kv-cache-dtype", "auto", "--max-num-seqs", "3"])
    config = EngineConfig.of(kv=args.kv, max_seqs=args.max_seqs)
    assert (config.kv, config.max_seqs) == ("exact", 3)


def test_text_that_looks_like_a_flag_is_text() -> None:
    args = parser().parse_args(["generate", "--prompt", "--dvice is no flag here", "--stop=--dvice"])
    assert args.prompt == "--dvice is no flag here" and args.stop == ["--dvice"]


@pytest.mark.parametrize("typed", ["", "bench", "train"])
def test_a_command_without_its_verb_prints_its_help(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(typed.split())
    assert f"usage: sparkdraft {typed}".strip() in capsys.readouterr().out


def leaves(top: ArgumentParser) -> Iterator[ArgumentParser]:
    verbs = [action for action in top._actions if isinstance(action, _SubParsersAction)]
    for action in verbs:
        for sub in action.choices.values():
            yield from leaves(sub)
    if not verbs:
        yield top


DECIDED = {  # by the command itself
    "sparkdraft bench offline": {"prefix_cache", "ngram", "count_ids"},
    "sparkdraft bench depth": {"prefix_cache", "spec", "ngram"},
    "sparkdraft bench kv": {"prefix_cache", "tq_centre", "count_ids"},
    "sparkdraft bench weights": {"prefix_cache", "weights", "weights_cache", "count_ids"},
    "sparkdraft check": {"count_ids"},
    "sparkdraft bench long-prompt": {"prefix_cache"},
    "sparkdraft train eval": {"ngram"},
}
PROFILED = ("sparkdraft serve", "sparkdraft generate", "sparkdraft chat")  # the others use no profile of settings


def test_every_verb_that_builds_an_engine_has_every_engine_flag() -> None:
    names = set(ENGINE_FIELDS)
    found = {leaf.prog: names & {action.dest for action in leaf._actions} for leaf in leaves(parser())}
    builders = {prog for prog, own in found.items() if "kv_tokens" in own}
    assert builders == {
        *(f"sparkdraft {verb}" for verb in ("serve", "demo", "generate", "chat", "check", "train eval")),
        *("sparkdraft export vllm", "sparkdraft recipe run", "sparkdraft cluster up"),
        *(f"sparkdraft bench {kind}" for kind in ("offline", "accept", "depth", "kv", "weights", "long-prompt")),
    }
    for prog in builders:
        left_out = DECIDED.get(prog, set()) | (set() if prog in PROFILED else {"profile"})
        assert found[prog] - left_out == names - left_out, prog


def test_every_flag_has_a_help_text_and_every_verb_an_example() -> None:
    for leaf in leaves(parser()):
        assert all(action.help for action in leaf._actions), leaf.prog
        assert f"  {leaf.prog}" in (leaf.epilog or ""), leaf.prog


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "demo", "bench offline", "train eval", "export vllm"])
def test_help_shows_common_flags_with_types_and_help_all_the_rest(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([*verb.split(), flag])
        assert not ended.value.code
        shown[flag] = capsys.readouterr().out
    short, whole = shown["--help"], shown["--help-all"]
    for flag in ("--max-seqs INT", "--drafter TEXT", "--help-all"):
        assert f"\n  {flag}" in short and f"\n  {flag}" in whole
    assert "--tq-key-bits" not in short and "--memory-fraction" not in short
    assert "\n  --tq-key-bits INT" in whole and "\n  --memory-fraction FLOAT" in whole
    hidden = len(set(re.findall(r"\n  (--[a-z-]+)", whole)) - set(re.findall(r"\n  (--[a-z-]+)", short)))
    assert f"{hidden} more flags: `sparkdraft {verb} --help-all`" in short and hidden > 15
    assert f"  sparkdraft {verb}" in short.split("\nexamples:")[-1]
    words = " ".join(short.split())
    assert "(default 0: automatic)" in words and "(default auto: " in words, "one bracket has a default and its meaning"


def test_flags_become_the_engine_s_options() -> None:
    typed = "generate --prompt x --memory-fraction 0.5 --no-graphs --no-ngram --no-prefix-cache --block-size 32"
    config = EngineConfig(**engine_options(parser().parse_args(typed.split())))
    assert config == EngineConfig(memory_fraction=0.5, graphs=False, ngram=False, prefix_cache=False, block_size=32)


def test_more_threads_than_cores_are_refused() -> None:
    cores = usable_cores()
    assert detect(EngineConfig(device="cpu", threads=cores)).cores == cores
    with pytest.raises(UserError, match=f"threads is {cores + 1}; this process may use {cores} cores"):
        detect(EngineConfig(device="cpu", threads=cores + 1))


@pytest.mark.parametrize(
    "option",
    [
        {"tq_mode": "capture_only"},
        {"tq_key_bits": 5},
        {"tq_value_bits": 4},
        {"tq_ring_capacity": 64},
        {"tq_initial_layers": 2},
        {"tq_centre": False},
    ],
)
@pytest.mark.parametrize("kv", ["exact", "fp8"])
def test_turboquant_s_options_without_it(option: dict[str, object], kv: str) -> None:
    (name,) = option
    with pytest.raises(UserError, match=f"{name} is .*, but kv is {kv} and only turboquant reads it"):
        EngineConfig(kv=kv, **option)  # type: ignore[arg-type]
    EngineConfig(kv="turboquant", **option)  # type: ignore[arg-type]
