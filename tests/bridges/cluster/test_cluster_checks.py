"""Each planted fault of a machine has its finding: over simulated hosts where the fault can be real, and over a folder
in the shape of /sys where it cannot (RoCE, cables)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkdraft.bridges.cluster.checks import Seen, judge, survey
from sparkdraft.bridges.cluster.hosts import Host, HostSpec, read_cluster, ssh_words
from sparkdraft.bridges.cluster.node import look
from sparkdraft.bridges.cluster.node.processes import identity
from sparkdraft.cli.cluster import paths_of, refuse_broken
from sparkdraft.cli.main import main
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.operate.doctor.finding import Finding, Status
from sparkdraft.server.config import ServerConfig
from tests.bridges.cluster.simulated import Simulation, clean, write_program, write_vllm
from tests.patience import wait_for


@pytest.fixture
def sparks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    with clean(Simulation(tmp_path)) as simulation:
        for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
            monkeypatch.delenv(name)
        for name in ("PATH", "FAKE_CLUSTER"):
            monkeypatch.setenv(name, simulation.environ[name])
        yield simulation
        wait_for(lambda: not simulation.processes(), why=lambda: "a process was left behind")


def findings(simulation: Simulation, **more: Any) -> list[Finding]:
    return judge(survey(read_cluster(str(simulation.file)), gap=0, **more))


def wrong(found: list[Finding]) -> list[tuple[str, str, Status]]:
    return [(each.part, each.name, each.status) for each in found if each.status >= Status.CHANGE]


def sentence(found: list[Finding]) -> str:
    with pytest.raises(UserError) as raised:
        refuse_broken(found)
    return str(raised.value)


def test_machines_without_a_fault(sparks: Simulation) -> None:
    found = findings(sparks, ports=[sparks.port])
    assert not wrong(found)
    assert {each.part for each in found} == {"spark-1", "spark-2"}
    assert any(each.name == "versions" and each.value.startswith("vllm 0.32.0") for each in found)


def test_another_version(sparks: Simulation) -> None:
    write_vllm(sparks.root / "spark-2" / "bin" / "vllm", "0.31.0")
    found = findings(sparks)
    assert wrong(found) == [("spark-2", "vLLM", Status.BROKEN)]
    assert sentence(found) == (
        "vLLM is 0.31.0 on spark-2 and 0.32.0 on spark-1: ranks of two versions do not understand each other: "
        "install vllm==0.32.0 on spark-2"
    )


def test_no_vllm(sparks: Simulation) -> None:
    (sparks.root / "spark-2" / "bin" / "vllm").unlink()
    (sparks.root / "ssh-bin" / "vllm").unlink()
    assert "spark-2: vLLM: `vllm` is not on the PATH: install vLLM there" in sentence(findings(sparks))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("ssh: connect to host spark-2 port 22: Connection timed out", "is it up, and does `ssh spark-2` work?"),
        ("me@spark-2: Permission denied (publickey).", "give this user's key to it once: ssh-copy-id spark-2"),
        ("Host key verification failed.", "accept its key once: ssh spark-2"),
    ],
)
def test_a_host_that_ssh_does_not_reach(sparks: Simulation, text: str, advice: str) -> None:
    sparks.fault("spark-2", refuses=text)
    assert sentence(findings(sparks)) == f"spark-2 cannot be reached over ssh ({text}): {advice}"


def test_a_host_that_nobody_knows(sparks: Simulation) -> None:
    sparks.file.write_text(sparks.file.read_text().replace("spark-2", "spark-9"))
    assert "correct the address in the hosts file" in sentence(findings(sparks))


def test_a_host_that_never_answers(sparks: Simulation) -> None:
    sparks.fault("spark-2", frozen=True)
    host = Host(read_cluster(str(sparks.file)).hosts[1], "spark-2", 1, "sparks")
    with pytest.raises(UserError, match="spark-2 has not answered in 1 s: is it up, or overloaded"):
        host.run("true", 1.0)


@pytest.mark.skipif(not shutil.which("ssh"), reason="no ssh is installed")
def test_the_real_ssh_knows_the_options() -> None:
    told = subprocess.run([*ssh_words(), "-G", "--", "spark-1"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert {"batchmode yes", "connecttimeout 10", "serveraliveinterval 5"} <= set(told.stdout.splitlines())


def test_a_missing_interface(sparks: Simulation) -> None:
    text = sparks.file.read_text()
    at = text.rindex('"lo"')
    sparks.file.write_text(text[:at] + '"enp1s0f1np1"' + text[at + 4 :])
    found = findings(sparks)
    assert ("spark-2", "interface enp1s0f1np1", Status.BROKEN) in wrong(found)
    assert sentence(found).startswith("spark-2 has no interface enp1s0f1np1; it has ")


def test_an_address_that_it_does_not_have(sparks: Simulation) -> None:
    sparks.file.write_text(sparks.file.read_text().replace("127.0.0.1", "192.0.2.77"))
    assert sentence(findings(sparks)).startswith("spark-2 does not have 192.0.2.77: correct `ip`")


@pytest.mark.parametrize(
    ("environ", "name", "status", "text"),
    [
        ({"NCCL_IP_DISABLE": "1"}, "NCCL_IP_DISABLE", Status.CHANGE, "did you mean NCCL_IB_DISABLE?"),
        ({"NCCL_PROTO": "LL"}, "NCCL_PROTO", Status.BROKEN, "it is LL on spark-2 and not set on spark-1"),
    ],
)
def test_a_wrong_variable_on_a_machine(
    sparks: Simulation, environ: dict[str, str], name: str, status: Status, text: str
) -> None:
    sparks.fault("spark-2", environ=environ)
    found = findings(sparks)
    assert wrong(found) == [("spark-2", name, status)]
    assert any(text in each.value for each in found)


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ('NCCL_SOCKET_IFNAME = "eth9"', "NCCL_SOCKET_IFNAME", "spark-2 has no interface eth9"),
        ('VLLM_HOST_IP = "127.0.0.7"', "VLLM_HOST_IP", "this host's ip is 127.0.0.1"),
        ('NCCL_IB_DISABLE = "0"\nNCCL_IB_HCA = "mlx5_9"', "NCCL_IB_HCA", "spark-2 has no RoCE device mlx5_9"),
    ],
)
def test_a_wrong_variable_in_the_hosts_file(sparks: Simulation, line: str, name: str, text: str) -> None:
    sparks.file.write_text(f"{sparks.file.read_text()}[host.environment]\n{line}\n")
    found = [each for each in findings(sparks) if each.part == "spark-2" and each.name == name]
    assert found and found[0].status == Status.BROKEN and text in found[0].value


def test_node_code_that_cannot_be_copied(sparks: Simulation) -> None:
    (sparks.root / "spark-2" / ".cache").write_text("a file where a folder should be")
    assert sentence(findings(sparks)).startswith("spark-2: the folder .cache/sparkdraft/cluster cannot be written (")


def test_ranks_of_one_machine_do_not_unpack_into_one_folder(tmp_path: Path) -> None:
    """They are asked at once, and tar fails on a file that another one makes."""
    hosts = [Host(HostSpec("local", "127.0.0.1", folder=str(tmp_path)), f"local/{i}", i, "pair") for i in range(2)]
    for each in hosts:
        each.install()
    assert len(list(tmp_path.glob("**/node/look.py"))) == 2


def test_a_python_that_is_none(sparks: Simulation) -> None:
    write_program(sparks.root / "spark-2" / "bin" / "python3", "#!/bin/sh\necho broken >&2\nexit 1\n")
    assert "`python3` cannot look at the machine (broken): name a Python" in sentence(findings(sparks))


def test_a_model_that_is_missing_and_a_port_that_is_taken(sparks: Simulation) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings(sparks, ports=[port], paths=["/no/such/model/"])
    assert wrong(found) == [
        ("spark-1", f"port {port}", Status.BROKEN),
        ("spark-1", "files", Status.BROKEN),
        ("spark-2", "files", Status.BROKEN),
    ]
    assert any("rsync -a /no/such/model spark-2:/no/such/" in each.advice for each in found)
    assert "it is in use" in sentence(found) and "(and 2 more, above)" in sentence(found)


def test_what_every_machine_must_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter and the template too, and by names that mean the same place everywhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "link").symlink_to("drafter")

    def paths(template: str = "", **engine: str) -> list[str]:
        return paths_of(ServerConfig(EngineConfig(**{"model": "Qwen/Qwen3-8B", **engine})), template)

    assert paths() == paths("{{ messages }}") == paths(drafter="z-lab/Qwen3-8B-DFlash-b16") == []
    assert paths("/t.jinja", model="/m", drafter="/d") == ["/m", "/d", "/t.jinja"]
    assert paths(drafter=str(tmp_path / "link")) == [str(tmp_path.resolve() / "drafter")]  # as it is sent
    for flag, given in (("drafter", {"drafter": "drafter"}), ("model", {"model": "~/m"})):
        with pytest.raises(UserError, match=f"--{flag} is .*; every machine reads it: give its absolute path"):
            paths(**given)
    with pytest.raises(UserError, match=r"--chat-template is 't\.jinja'; every machine reads it"):
        paths("t.jinja")


LISTENS = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_a_killed_keeper_left_is_ended_before_ports_are_looked_at(
    sparks: Simulation, is_kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a running keeper holds is another supervisor's, and is only reported."""
    monkeypatch.setenv("SPARKDRAFT_CACHE", sparks.environ["SPARKDRAFT_CACHE"])
    monkeypatch.setattr("sparkdraft.cli.cluster.survey", partial(survey, gap=0))
    left = subprocess.Popen([sys.executable, "-c", LISTENS, str(sparks.port)], env=sparks.environ)
    wait_for(lambda: look.port_problem(sparks.port))
    folder = sparks.root / "spark-1/.cache/sparkdraft/cluster/sparks/rank0"
    folder.mkdir(parents=True)
    keeper = identity(os.getpid()) if is_kept else [1 << 30, 1]
    (folder / "processes.json").write_text(json.dumps([keeper, identity(left.pid)]))
    flags = ["--model", "Qwen/Qwen3-8B", "--port", str(sparks.port), "--check"]
    try:
        status = main(["cluster", "up", str(sparks.file), *flags])
        told = capsys.readouterr().err
        assert (left.poll() is None) == is_kept
        assert status == int(is_kept) and ("it is in use" in told) == is_kept, told
    finally:
        left.kill()
        left.wait()


# ---- what only a Spark has


def sys_tree(root: Path, mtu: int = 9000, state: str = "4: ACTIVE", speed: int = 200000) -> Path:
    """/sys/class of a Spark with one port in use: two twins of net and of RoCE."""
    gid = "0000:0000:0000:0000:0000:ffff:c0a8:b10b"
    for name in ("enp1s0f1np1", "enP2p1s0f1np1"):
        write(root / "net" / name, operstate="up", mtu=mtu, speed=speed)
        write(root / "net" / name / "statistics", rx_errors=0, rx_crc_errors=0)
    for name in ("rocep1s0f1", "roceP2p1s0f1"):
        port = root / "infiniband" / name / "ports" / "1"
        write(port, state=state, rate="200 Gb/sec (4X HDR)")
        write(port / "gids", **{"0": "fe80:" + gid[5:], "1": gid, "3": gid, "4": ":".join(["0000"] * 8)})
        write(port / "gid_attrs" / "types", **{"0": "RoCE v2", "1": "IB/RoCE v1", "3": "RoCE v2"})
        write(port / "counters", symbol_error=0, link_downed=1)
        write(port / "hw_counters", packet_seq_err=0)
    return root


def write(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def spark(root: Path, rdma: tuple[str, ...] = ("rocep1s0f1", "roceP2p1s0f1"), gid_index: int | None = 3) -> Seen:
    """What `look` finds in such a tree."""
    interfaces = ("enp1s0f1np1", "enP2p1s0f1np1")
    spec = HostSpec("spark-1", "192.168.177.11", interfaces, rdma, gid_index)
    errors = look.errors(root, list(interfaces), list(rdma))
    facts = {
        "vllm": {"vllm": "0.32.0"},
        "gpus": [{"name": "NVIDIA GB10", "driver": "580.126.09"}],
        "environ": {},
        "all_interfaces": list(interfaces),
        "interfaces": {name: look.interface(root / "net" / name) for name in interfaces},
        "rdma": {each.name: look.rdma(each) for each in sorted((root / "infiniband").glob("*"))},
        "errors": [errors, errors],
        "memory": {"total": 120 << 30, "available": 110 << 30},
        "ports": {},
        "has_ip": True,
        "reach": "",
        "missing": [],
    }
    return Seen(Host(spec, "spark-1", 0, "sparks"), facts)


def test_a_spark_without_a_fault(tmp_path: Path) -> None:
    found = judge([spark(sys_tree(tmp_path))], 0.85)
    assert not wrong(found)
    shown = [f"{each.name}: {each.value}" for each in found]
    assert "interface enp1s0f1np1: 200 Gbit/s, frames of 9000 bytes" in shown
    assert "RoCE: rocep1s0f1 is active, 200 Gb/sec (4X HDR)" in shown
    assert "cable: no errors are added" in shown


@pytest.mark.parametrize(
    ("tree", "host", "name", "status", "text"),
    [
        ({"mtu": 1500}, {}, "interface enp1s0f1np1", Status.CHANGE, "frames of 1500 bytes"),
        ({"speed": 10000}, {}, "interface enp1s0f1np1", Status.CHANGE, "10 Gbit/s"),
        ({"state": "1: DOWN"}, {}, "RoCE", Status.BROKEN, "rocep1s0f1 is DOWN"),
        ({}, {"rdma": ("rocep1s0f1",)}, "RoCE", Status.CHANGE, "its twin roceP2p1s0f1 is not"),
        (
            {},
            {"rdma": ("mlx5_0",)},
            "RoCE",
            Status.BROKEN,
            "has no RoCE device mlx5_0; it has roceP2p1s0f1, rocep1s0f1",
        ),
        ({}, {"rdma": ()}, "RoCE", Status.CHANGE, "ranks use TCP"),
        ({}, {"gid_index": 1}, "GID", Status.BROKEN, "GID 1 of rocep1s0f1 is"),
        ({}, {"gid_index": 0}, "GID", Status.BROKEN, "GID 0 of rocep1s0f1 is"),
        ({}, {"gid_index": 9}, "GID", Status.BROKEN, "GID 9 of rocep1s0f1 is empty"),
    ],
)
def test_roce_and_interfaces(
    tmp_path: Path, tree: dict[str, Any], host: dict[str, Any], name: str, status: Status, text: str
) -> None:
    found = [each for each in judge([spark(sys_tree(tmp_path, **tree), **host)]) if each.status >= Status.CHANGE]
    assert found and (found[0].name, found[0].status) == (name, status) and text in found[0].value, found
    if name == "GID":
        assert "set gid_index = 3" in found[0].advice


def test_a_bad_cable(tmp_path: Path) -> None:
    """As in a posted case: lanes whose errors grew by thousands in seconds."""
    seen = spark(sys_tree(tmp_path))
    counters = tmp_path / "infiniband" / "rocep1s0f1" / "ports" / "1" / "counters"
    write(counters, symbol_error=15201)
    before = look.errors(tmp_path, [], ["rocep1s0f1"])
    write(counters, symbol_error=20379)
    seen.facts["errors"] = [before, look.errors(tmp_path, [], ["rocep1s0f1"])]
    (found,) = [each for each in judge([seen]) if each.status == Status.BROKEN]
    assert found.value == "errors grow: rocep1s0f1 symbol_error 15201 -> 20379" and "swap the cable" in found.advice


def test_lanes_of_ethtool() -> None:
    told = "     rx_packets: 17\n     rx_err_lane_1_phy: 976\n     rx_symbol_err_phy: 0\n"
    assert look.LANES.findall(told) == [("rx_err_lane_1_phy", "976"), ("rx_symbol_err_phy", "0")]


def test_drivers_that_differ_and_memory_that_is_taken(tmp_path: Path) -> None:
    one, two = spark(sys_tree(tmp_path)), spark(tmp_path)
    two.facts["gpus"] = [{"name": "NVIDIA GB10", "driver": "590.10"}]
    two.facts["memory"] = {"total": 120 << 30, "available": 60 << 30}
    other = Seen(Host(two.host.spec, "spark-2", 1, "sparks"), two.facts)
    assert wrong(judge([one, other], 0.85)) == [
        ("spark-2", "driver", Status.CHANGE),
        ("spark-2", "memory", Status.CHANGE),
    ]
    two.facts["gpus"] = []
    assert wrong(judge([one, other]))[0] == ("spark-2", "GPU", Status.BROKEN)
