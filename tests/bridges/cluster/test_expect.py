"""What is predicted for several machines: the sums of one machine, shared, and all-reduces on top; held to the figures
that were posted of Sparks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkdraft.bridges.cluster.expect import LINKS, Case, Link, case, cases, explain
from sparkdraft.cli.main import main
from sparkdraft.cli.plan import read_drafter, read_formats, read_model
from sparkdraft.config import EngineConfig
from sparkdraft.operate.forecast.forecast import Forecast, Question, chance_of
from sparkdraft.operate.forecast.machine import find_machine

GEMMA = ("--model", "gemma4-31b", "--weights", "fp8")
NO_TIME = Link(0.0, 0.0, "none")


def question(model: str, weights: str = "auto", drafter: str = "none", spec: str = "auto") -> Question:
    machine, (shape, raw) = find_machine("gb10"), read_model(model)
    formats, _ = read_formats(model, weights, raw, shape, machine)
    config = EngineConfig(model=model, spec=spec)
    draft, names = read_drafter(drafter, model, shape)
    return Question(shape, machine, config, formats, draft, context=1024, names=names)


def test_one_machine_is_the_plan_s_own_with_vllm_s_losses() -> None:
    asked = replace(question("gpt-oss-120b"), engine="vllm")
    own, found = Forecast(asked), case(asked, 1, LINKS["roce"])
    assert found.plain == own.plain and found.tokens == own.max_tokens and found.reduces == 0 and found.share == 0


def test_a_step_of_two_machines_is_half_of_what_is_read_and_the_all_reduces() -> None:
    asked = replace(question("gemma4-31b", "fp8"), engine="vllm")
    free = case(asked, 2, NO_TIME)
    two = case(asked, 2, Link(1e-3, 0.0, ""))
    assert two.reduces == 2 * 60 + 2
    whole = Forecast(asked).seconds()
    assert free.step == pytest.approx((whole.total - whole.fixed) / 2 + whole.fixed)
    assert two.step == pytest.approx(free.step + two.reduces * 1e-3)
    assert two.share == pytest.approx(two.reduces * 1e-3 / two.step)


def test_the_seed_s_four_machines_are_no_faster_than_two() -> None:
    """Gemma-4-31B in FP8, 8 drafts of which 28.82 % were accepted, over TCP: 18.5 tok/s by two Sparks, 18.5 to 20 by
    four. The latency is the one that fits these figures, so this holds the arithmetic and its reasons, not the link."""
    chance = chance_of(1 + 8 * 0.2882, 8)
    asked = replace(question("gemma4-31b", "fp8", "gemma4-31b-dflash", "8"), chances={"dialogue": chance})
    found = cases(asked, [2, 4], LINKS["tcp"])
    speeds = {each.machines: each.drafted.speed.expected for each in found if each.drafted}
    assert speeds[2] == pytest.approx(18.5, rel=0.1) and speeds[4] == pytest.approx(19.25, rel=0.1)
    lines = explain(found, LINKS["tcp"])
    assert any(line.startswith("4 machines are no faster than 2 machines") for line in lines), lines
    assert "122 all-reduces per step of 603 us are 74 of 150 ms, 49%" in lines[0], lines


def test_over_roce_four_machines_help() -> None:
    lines = explain(cases(question("gemma4-31b", "fp8"), [2, 4], LINKS["roce"]), LINKS["roce"])
    assert any(line.startswith("4 machines are 1.6") for line in lines), lines


def test_latency_between_more_machines() -> None:
    tcp = LINKS["tcp"]
    assert tcp.all_reduce(2, 0) == 0.6e-3 and tcp.all_reduce(4, 0) == pytest.approx(0.9e-3)  # as reported
    assert tcp.all_reduce(4, 4e6) - tcp.all_reduce(4, 0) == pytest.approx(
        1.5 * (tcp.all_reduce(2, 4e6) - tcp.all_reduce(2, 0))
    )


def test_what_fits_and_what_is_refused() -> None:
    asked = question("qwen3.5-35b-a3b")
    two, four = (case(replace(asked, engine="vllm"), count, NO_TIME) for count in (2, 4))
    assert two.tokens < four.tokens < 1.5 * two.tokens  # two heads of keys on four machines
    three = case(replace(asked, engine="vllm"), 3, NO_TIME)
    assert three.refusal == "16 heads over 2 of keys cannot be divided between 3 machines"
    llama = replace(question("llama-3.1-8b"), engine="vllm")
    small = replace(llama.machine, hardware=replace(llama.machine.hardware, free_bytes=12 << 30))
    alone, both = (case(replace(llama, machine=small), count, NO_TIME) for count in (1, 2))
    assert alone.refusal and not both.refusal and both.tokens > 1024
    most = both.tokens // 1024
    assert case(replace(llama, machine=small, streams=most), 2, NO_TIME).refusal == ""
    many = case(replace(llama, machine=small, streams=most + 1), 2, NO_TIME)
    assert most <= many.streams <= most + 1 and many.tokens >= 1024 * many.streams
    crowd = case(replace(llama, machine=small, streams=1000), 2, NO_TIME)
    assert 0 < crowd.streams < 1000
    none = case(replace(llama, machine=small, context=131072), 2, NO_TIME)
    assert none.refusal.endswith("tokens of context fit, and a stream has 131,072"), none


def test_nothing_fits() -> None:
    nowhere = [Case(1, "x"), Case(2, "x")]
    assert explain(nowhere, NO_TIME) == [
        "it fits on none of these: choose smaller weights, a shorter context or more machines"
    ]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan", *GEMMA, "--link", "tcp"]) == 0
    told = capsys.readouterr().out
    assert "2 machines: 122 all-reduces" in told and "73% of a token's time" in told
    assert "4 machines are no faster than 2 machines" in told


def test_the_machines_are_those_of_the_hosts_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = "".join(f'[[host]]\naddress = "spark-{i}"\nip = "192.168.177.{i}"\n' for i in (1, 2, 3, 4))
    (tmp_path / "sparks.toml").write_text(hosts)
    for flags, count in (((), 4), (("--machines", "2"), 2)):
        assert main(["cluster", "plan", str(tmp_path / "sparks.toml"), *GEMMA, *flags]) == 0
        assert f"{count} machines: 122 all-reduces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--machines 1", "--machines is '1'; give numbers from 2 to 16"),
        ("--machines two", "--machines is 'two'"),
        ("--link wifi", "--link is 'wifi'; it must be one of roce, tcp"),
        ("missing.toml", "the hosts file missing.toml cannot be read: No such file or directory"),
        ("--machine cpu --model tiny", "has no losses of 'vllm'"),
        ("--context 0", "--context 0; ask for 1 stream or more"),
    ],
)
def test_wrong_flags(flags: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan", *flags.split()]) == 1
    assert sentence in capsys.readouterr().err
