"""The hosts file: what it means, and a sentence for what is wrong with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sparkdraft.bridges.cluster.hosts import parse_cluster, read_cluster
from sparkdraft.bridges.cluster.ranks import rank_environment, rank_words
from sparkdraft.bridges.tables import Unread
from sparkdraft.bridges.vllm.command import VllmCommand
from sparkdraft.cli.cluster import shown_url
from sparkdraft.config import EngineConfig
from sparkdraft.core import UserError
from sparkdraft.server.config import ServerConfig

HOSTS = """
vllm = "/opt/vllm/bin/vllm"
interfaces = ["enp1s0f1np1", "enP2p1s0f1np1"]
rdma = ["rocep1s0f1", "roceP2p1s0f1"]
[environment]
NCCL_DEBUG = "WARN"
[[host]]
address = "spark-1"
ip = "192.168.177.11"
gid_index = 3
[[host]]
address = "me@spark-2"
ip = "192.168.177.12"
interfaces = ["enp1s0f0np0"]
environment = {NCCL_IB_TIMEOUT = 22}
folder = "~/logs"
"""


def test_hosts_take_what_they_leave_out_from_the_top() -> None:
    cluster = parse_cluster(tomllib.loads(HOSTS), "sparks")
    first, second = cluster.hosts
    assert cluster.name == "sparks" and cluster.labels() == ["spark-1", "me@spark-2"]
    assert second.vllm == "/opt/vllm/bin/vllm" and second.interfaces == ["enp1s0f0np0"] and second.folder == "logs"
    assert second.environment == {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "22"}
    assert rank_environment(first, 60) == {
        "VLLM_HOST_IP": "192.168.177.11",
        "VLLM_ENGINE_READY_TIMEOUT_S": "60",
        "NCCL_SOCKET_IFNAME": "enp1s0f1np1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1",
        "NCCL_IB_MERGE_NICS": "1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_DEBUG": "WARN",
    }


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[[host]]", "[[hots]]", "at the top 'hots' is not known: did you mean host?"),
        ('ip = "192.168.177.12"', "", "in host 2 ip is missing"),
        ("192.168.177.12", "spark-2", "in host 2 the ip is 'spark-2'; give the IPv4 address"),
        ("192.168.177.12", "192.168.177.11", "the ip 192.168.177.11 is that of two hosts"),
        ('"me@spark-2"', '"-oProxyCommand=x"', "the address is '-oProxyCommand=x'; give it as `ssh` takes it"),
        ("gid_index = 3", 'gid_index = "3"', "gid_index in host 1 must be a whole number, and is '3'"),
        ("gid_index = 3", "gid = 3", "in host 1 'gid' is not known"),
        ('["enp1s0f0np0"]', '"enp1s0f0np0"', "interfaces in host 2 must be a list of names"),
        ("[environment]", "hang_seconds = -1\n[environment]", "hang_seconds at the top is -1; it must be 0 or more"),
        ("[environment]", 'name = "a/b"\n[environment]', "the name is 'a/b'"),
        ("[environment]", "port = 99999\n[environment]", "port is 99999; it must be 1 to 65535"),
        ("[environment]", "port = true\n[environment]", "port at the top must be a whole number, and is True"),
        ("[environment]", "[[environment]]", "environment at the top must be a table of variables, and is [{"),
        ("{NCCL_IB_TIMEOUT = 22}", '"a=b"', "environment in host 2 must be a table of variables, and is 'a=b'"),
        ("= 22}", "= true}", "NCCL_IB_TIMEOUT of the environment in host 2 must be a text or a number, and is True"),
        ('"WARN"', '["WARN"]', "NCCL_DEBUG of the environment at the top must be a text or a number, and is ['WARN']"),
        ("[environment]", "[[environment", "is not valid TOML"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "sparks.toml"
    path.write_text(HOSTS.replace(old, new))
    with pytest.raises(UserError) as raised:
        read_cluster(str(path))
    assert sentence in str(raised.value) and str(path) in str(raised.value)


def test_one_machine_is_no_cluster_and_a_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"two or more \[\[host\]\] tables"):
        parse_cluster(tomllib.loads(HOSTS[: HOSTS.rindex("[[host]]")]), "x")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_cluster(str(tmp_path / "none.toml"))


def test_every_rank_has_the_same_flags_and_its_own_number() -> None:
    cluster = parse_cluster(tomllib.loads(HOSTS), "sparks")
    command = VllmCommand("m", {"port": 8000}, {}, [])
    words = [rank_words(command, cluster, rank) for rank in (0, 1)]
    assert words[0][:5] == ["vllm", "serve", "m", "--port", "8000"] and words[1][-1] == "--headless"
    assert words[1][: words[1].index("--node-rank")] == words[0][: words[0].index("--node-rank")]
    assert words[0][words[0].index("--tensor-parallel-size") + 1] == "2"
    extra = VllmCommand("m", {}, {}, [], (Unread("--nnodes", "3", ("--nnodes", "3"), ()),))
    with pytest.raises(UserError, match="--nnodes is set by the cluster"):
        rank_words(extra, cluster, 0)


@pytest.mark.parametrize(
    ("address", "host", "url"),
    [
        ("me@spark-1", "0.0.0.0", "http://spark-1:8000"),
        ("ssh://me@spark-1:2222", "::", "http://spark-1:8000"),
        ("local", "0.0.0.0", "http://127.0.0.1:8000"),
        ("spark-1", "127.0.0.1", "http://127.0.0.1:8000"),
        ("spark-1", "10.0.0.1", "http://10.0.0.1:8000"),
    ],
)
def test_the_server_is_shown_where_it_is(address: str, host: str, url: str) -> None:
    cluster = parse_cluster(tomllib.loads(HOSTS.replace('"spark-1"', f'"{address}"')), "sparks")
    assert shown_url(cluster, ServerConfig(EngineConfig(), host=host, port=8000, allow_public=True)) == url


def test_the_file_of_the_docs_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()
    cluster = parse_cluster(tomllib.loads(page.split("```toml\n")[1].split("```")[0]), "sparks")
    assert len(cluster.hosts) == 2 and cluster.hosts[0].rdma
