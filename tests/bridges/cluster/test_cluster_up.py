"""`cluster up|status|down` over simulated machines and over this one twice: real processes, planted faults. Every end,
good or bad, leaves one sentence and no process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdraft.cli.main import main
from tests.bridges.cluster.simulated import Simulation, clean
from tests.patience import PATIENT, wait_for


@pytest.fixture
def sparks(tmp_path: Path) -> Iterator[Simulation]:
    with clean(Simulation(tmp_path, silence_seconds=60, hang_seconds=60, restarts=1)) as simulation:
        yield simulation


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Simulation]:
    """For tests that wait until a silence is noticed."""
    with clean(Simulation(tmp_path, silence_seconds=8, hang_seconds=8, restarts=1)) as simulation:
        yield simulation


def until_ready(simulation: Simulation, process: subprocess.Popen[str], restarts: int = 0) -> None:
    def is_ready() -> bool:
        state = simulation.state()
        return bool(state and state["phase"] == "ready" and len(state["restarts"]) >= restarts)

    wait_for(lambda: is_ready() or process.poll() is not None, why=simulation.said)
    assert is_ready(), simulation.said()


def nothing_left(simulation: Simulation) -> None:
    wait_for(lambda: not simulation.processes(), why=lambda: str(simulation.processes()))


def test_two_ranks_on_one_machine_come_up_and_go_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(verb: str, *flags: str) -> tuple[int, str]:
        """In this process, which starts in no time."""
        status = main(["cluster", verb, str(here.file), *flags])
        told = capsys.readouterr()
        return status, told.out or told.err

    with clean(Simulation(tmp_path, local=True)) as here, here.up("--api-key", "hidden", "--max-seqs", "4") as process:
        until_ready(here, process)
        head, other = here.called(0, "home"), here.called(1, "home")
        assert head["args"][:2] == ["serve", "Qwen/Qwen3-8B"] and "--headless" not in head["args"]
        more = "--distributed-executor-backend mp --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port"
        assert " ".join(other["args"]).endswith(f"{more} {here.master} --headless")
        assert "--tensor-parallel-size 2" in " ".join(other["args"])
        assert head["environ"]["VLLM_API_KEY"] == "hidden" and "VLLM_API_KEY" not in other["environ"]
        assert head["environ"]["GLOO_SOCKET_IFNAME"] == "lo" and head["environ"]["NCCL_IB_DISABLE"] == "1"
        assert "hidden" not in " ".join(head["args"]) and "hidden" not in here.said()
        for name in ("SPARKDRAFT_CACHE", "HOME", "FAKE_CLUSTER"):
            monkeypatch.setenv(name, here.environ[name])
        status, shown = run("status")
        assert status == 0 and "cluster sparks is ready" in shown and "logs: " in shown and " only)" not in shown
        status, shown = run("up", "--model", "Qwen/Qwen3-8B")
        assert status == 1 and "cluster sparks is up already (ready" in shown
        for _ in range(2):  # the second time there is nothing to do
            assert run("down") == (0, "cluster sparks is down\n")
        assert process.wait(PATIENT) == 0
        nothing_left(here)
        assert "stand-in rank 1 of 2" in (here.cache / "cluster/sparks/rank1.log").read_text()
        assert run("status") == (1, "cluster sparks is down\n")


def test_the_cluster_alone_says_how_many_share_the_model(
    sparks: Simulation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["cluster", "up", str(sparks.file), "--model", "Qwen/Qwen3-8B"]
    monkeypatch.setenv("PATH", "/nowhere")  # no machine is asked
    assert main([*flags, "--tensor-parallel", "2"]) == 1
    assert "--tensor-parallel is set by the cluster" in capsys.readouterr().err
    monkeypatch.setenv("EXTRA_ARGS", "-tp 2")
    assert main(flags) == 1
    assert "leave it out here and in EXTRA_ARGS" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.slow
def test_a_machine_that_dies_restarts_all_ranks_together_once_then_it_gives_up(sparks: Simulation) -> None:
    with sparks.up() as process:
        until_ready(sparks, process)
        first = [sparks.called(rank)["pids"][0] for rank in (0, 1)]
        sparks.signal("spark-2", signal.SIGKILL)
        wait_for(lambda: "all ranks are restarted together in 5 s" in sparks.said(), why=sparks.said)
        until_ready(sparks, process, restarts=1)
        second = [sparks.called(rank)["pids"][0] for rank in (0, 1)]
        assert not set(first) & set(second), "a rank was not restarted"
        assert "rank 1 on spark-2 ended" in sparks.state()["restarts"][0]
        assert "restarted: rank 1 on spark-2 ended" in sparks.command("status").stdout
        sparks.signal("spark-2", signal.SIGKILL)
        assert process.wait(PATIENT) == 1
        last = sparks.said().strip().splitlines()[-1]
        assert "all ranks were restarted 1 times within an hour, and failed again: rank 1 on spark-2 ended" in last
        nothing_left(sparks)
        shown = sparks.command("status")
        assert shown.returncode == 1 and shown.stdout.startswith("cluster sparks has failed: all ranks were restarted")


@pytest.mark.slow
def test_four_machines_come_up_and_go_down_together(tmp_path: Path) -> None:
    with clean(Simulation(tmp_path, count=4, restarts=1)) as four, four.up() as process:
        until_ready(four, process)
        for rank in range(4):
            args = " ".join(four.called(rank)["args"])
            assert f"--nnodes 4 --node-rank {rank} " in args and "--tensor-parallel-size 4" in args
            assert ("--headless" in args) == (rank > 0)
        four.signal("spark-4", signal.SIGKILL)
        until_ready(four, process, restarts=1)
        assert "rank 3 on spark-4 ended" in four.state()["restarts"][0]
        assert four.command("down").returncode == 0 and process.wait(PATIENT) == 0
        nothing_left(four)


@pytest.mark.slow
def test_a_machine_that_freezes_is_noticed_and_ends_its_rank_when_it_wakes(hasty: Simulation) -> None:
    with hasty.up() as process:
        until_ready(hasty, process)
        frozen = hasty.processes("spark-2")
        hasty.signal("spark-2", signal.SIGSTOP)
        hasty.fault("spark-2", refuses="ssh: connect to host spark-2 port 22: Connection timed out")
        wait_for(lambda: "spark-2 has not been heard of for 8 s" in hasty.said(), why=hasty.said)
        wait_for(lambda: "waits for spark-2: spark-2 cannot be reached over ssh" in hasty.said(), why=hasty.said)
        assert not hasty.processes("spark-1"), "the other rank waits for ever"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENT) == 0
        for pid in frozen:
            hasty.signal("spark-2", signal.SIGCONT)
            assert pid
        nothing_left(hasty)


@pytest.mark.slow
def test_a_server_that_hangs_is_restarted(hasty: Simulation) -> None:
    with hasty.up() as process:
        until_ready(hasty, process)
        (hasty.root / "spark-1" / "hangs").touch()
        wait_for(lambda: "has made no token for 8 s though it was asked for one: it hangs" in hasty.said())
        (hasty.root / "spark-1" / "hangs").unlink()
        until_ready(hasty, process, restarts=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENT) == 0
        nothing_left(hasty)


@pytest.mark.slow
def test_ranks_end_when_their_supervisor_is_killed(sparks: Simulation) -> None:
    with sparks.up() as process:
        until_ready(sparks, process)
        process.kill()
        process.wait()
        nothing_left(sparks)
        shown = sparks.command("status")
        assert shown.returncode == 1 and "its supervisor is gone" in shown.stdout
        assert sparks.command("down").returncode == 0 and sparks.state()["phase"] == "down"


@pytest.mark.slow
def test_a_rank_that_cannot_start_is_not_tried_again(sparks: Simulation) -> None:
    (sparks.root / "spark-2" / "fails").touch()
    with sparks.up() as process:
        assert process.wait(PATIENT) == 1
        last = sparks.said().strip().splitlines()[-1]
        assert last.startswith("sparkdraft: the cluster did not start: rank 1 on spark-2 ended: its process ended with")
        assert "its last line was: ValueError: the stand-in cannot load this model" in last
        nothing_left(sparks)


@pytest.mark.slow
def test_a_full_disk_ends_the_log_and_not_the_server(sparks: Simulation) -> None:
    here = sparks.cache / "cluster/sparks"
    here.mkdir(parents=True)
    (here / "rank0.log").symlink_to("/dev/full")
    with sparks.up() as process:
        until_ready(sparks, process)
        wait_for(lambda: sparks.said().count("is no longer written: No space left on device") == 1, why=sparks.said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENT) == 0
        nothing_left(sparks)
