"""/metrics under our names and vLLM's, and the files of contrib that are made for it: a dashboard and a unit."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdraft.cli.main import parser
from sparkdraft.server.config import check_names, default_of
from tests.patience import PATIENT
from tests.server.conftest import FakeClient, Live, live

CONTRIB = Path(__file__).parents[2] / "contrib"
CHAT = "/v1/chat/completions"
SAID = "three pieces"
LINE = re.compile(r"([a-z]\w*(?::\w+)?)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COUNTERS = {  # what dashboards and tools made for vLLM read
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}


class Scrape:
    """What a Prometheus server reads; it must be as the format asks for."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.series: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        family, seen = "", set[str]()
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, family, kind = line.split(" ")
                assert family not in seen, f"{family} is written in two places"
                seen.add(family)
                self.types[family] = kind
            elif not line.startswith("# HELP "):
                match = LINE.fullmatch(line)
                assert match, line
                name, labels, value = match.groups()
                assert (
                    name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == family or name == family
                )
                key = tuple(LABEL.findall(labels or ""))
                assert ",".join(f'{a}="{b}"' for a, b in key) == (labels or ""), line
                assert key not in self.series[name], f"{line} is there twice"
                self.series[name][key] = float(value)

    def value(self, name: str, **labels: str) -> float:
        (found,) = [value for key, value in self.series[name].items() if dict(key).items() >= labels.items()]
        return found


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeClient(lambda prompt, params: SAID, size=4, delay=0.002), served_name='our "model"') as running:
        yield running


def scrape(server: Live) -> Scrape:
    return Scrape(server.http.get("/metrics").text)


def used(server: Live) -> Scrape:
    """After three chats, one of them with two texts."""
    for n in (1, 1, 2):
        assert server.post(CHAT, messages=[{"role": "user", "content": "hello"}], n=n).status_code == 200
    assert server.chat(n=0).status_code == 400
    return scrape(server)


def test_vllms_names_are_there_with_its_types_and_label(server: Live) -> None:
    found = used(server)
    kinds = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(HISTOGRAMS, "histogram")
    assert {name: kind for name, kind in found.types.items() if name.startswith("vllm:")} == kinds
    for name, series in found.series.items():
        if name.startswith("vllm:"):
            assert series and all(dict(key)["model_name"] == 'our \\"model\\"' for key in series), name
    for name, label in (
        ("request_success_total", "finished_reason"),
        ("spec_decode_num_accepted_tokens_per_pos_total", "position"),
    ):
        assert all(set(dict(key)) == {"model_name", label} for key in found.series[f"vllm:{name}"])


def test_both_prefixes_have_the_same_numbers(server: Live) -> None:
    found = used(server)
    for name, series in found.series.items():
        if name.startswith("vllm:") and "time_per_output_token_seconds" not in name.replace("request_time", ""):
            own = found.series[name.replace("vllm:", "sparkdraft_")]
            assert own == {tuple(pair for pair in key if pair[0] != "model_name"): each for key, each in series.items()}
    earlier, later = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
    for end in ("_bucket", "_sum", "_count"):
        assert found.series[earlier + end] == found.series[later + end] != {}


def test_nothing_is_counted_twice(server: Live) -> None:
    found, num_prompt, num_output = used(server), len("user: hello\nassistant:"), len(SAID) + 1
    assert found.value("vllm:request_success_total", finished_reason="stop") == 4, "texts"
    assert found.value("vllm:time_to_first_token_seconds_count") == 3, "requests"
    assert found.value("vllm:e2e_request_latency_seconds_count") == 3
    assert found.value("vllm:prompt_tokens_total") == found.value("vllm:prefix_cache_queries_total") == 3 * num_prompt
    assert found.value("vllm:prefix_cache_hits_total") == found.value("vllm:prompt_tokens_cached_total") == 3
    assert found.value("vllm:generation_tokens_total") == 4 * num_output
    assert found.value("vllm:request_generation_tokens_sum") == 4 * num_output
    assert found.value("vllm:spec_decode_num_draft_tokens_total") == 16
    assert found.value("vllm:spec_decode_num_accepted_tokens_total") == 8
    assert found.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 4
    assert found.value("vllm:num_requests_running") == 1 and found.value("vllm:num_requests_waiting") == 2
    assert found.value("vllm:kv_cache_usage_perc") == 0.25
    assert found.value("sparkdraft_http_requests_total", status="400") == 1


def test_pauses_between_tokens_are_those_of_requests_with_one_text(server: Live) -> None:
    found = used(server)
    assert found.value("vllm:inter_token_latency_seconds_count") == 2 * 2, "two chats of three pieces"
    assert 4 * 0.002 <= found.value("vllm:inter_token_latency_seconds_sum") < PATIENT


def test_histograms_add_up(server: Live) -> None:
    found = used(server)
    for name in HISTOGRAMS:
        buckets = list(found.series[f"{name}_bucket"].items())
        counts = [count for _, count in buckets]
        assert counts == sorted(counts) and dict(buckets[-1][0])["le"] == "+Inf"
        assert counts[-1] == found.value(f"{name}_count")


def test_the_documentation_lists_what_is_there(server: Live) -> None:
    found = used(server)
    page = (CONTRIB.parent / "docs/operations.md").read_text(encoding="utf-8").split("## Metrics")[1].split("```")[0]
    table = re.findall(r"`(\w+)`", "".join(line for line in page.splitlines() if line.startswith("| `")))
    names = {name for name in table if name not in ("finished_reason", "position")}
    assert {f"vllm:{name}" for name in names} | {"vllm:time_per_output_token_seconds"} == COUNTERS | GAUGES | HISTOGRAMS
    assert all(f"sparkdraft_{name}" in found.types for name in names)
    for name in re.findall(r"`(sparkdraft_\w+)`", page):
        assert name in found.types or name == "sparkdraft_", name


# ---- contrib/grafana.json


def test_the_dashboard_is_one_that_can_be_imported() -> None:
    board = json.loads((CONTRIB / "grafana.json").read_text())
    assert board["schemaVersion"] >= 36 and board["title"] and board["uid"] and "id" not in board
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 10
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, f"{panel['title']} lies over another panel"
        taken |= cells
        assert panel["type"] in ("timeseries", "stat") and panel["title"] and panel["description"] and panel["targets"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_asks_for_what_metrics_has(server: Live) -> None:
    """Every name and every label of every query is in a scrape."""
    found, text = used(server), (CONTRIB / "grafana.json").read_text()
    board, asked = json.loads(text), set[str]()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    for query in queries:
        names = set(re.findall(r"\b(?:sparkdraft_|vllm:)\w+", query))
        assert names and query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        for name in names:
            assert found.series.get(name), f"{query} asks for {name}, which /metrics does not have"
            assert name not in found.types or found.types[name] != "histogram"
        labels = {label for name in names for key in found.series[name] for label, _ in key} | {"instance"}
        by = {label for group in re.findall(r"\bby \(([\w, ]+)\)", query) for label in group.split(", ")}
        matched = set(re.findall(r"(\w+)(?:=~|!=|!~|=)\"", query))
        assert by | matched <= labels, query
        counters = {name for name in names if found.types.get(name) == "counter" or name.endswith("_bucket")}
        assert all(re.search(rf"(?:rate|increase)\({name}\{{", query) for name in counters), query
        asked |= names
    for name in (
        *("num_requests_running", "num_requests_waiting", "generation_tokens_total", "kv_cache_usage_perc"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "http_requests_total"),
        *("prefix_cache_hits_total", "prefix_cache_queries_total", "spec_decode_num_accepted_tokens_total"),
    ):
        assert f"sparkdraft_{name}" in asked
    legends = set(re.findall(r"\{\{(\w+)\}\}", text))
    assert legends == {"instance", "position", "status", "finished_reason"}


# ---- contrib/sparkdraft.service

UNIT = CONTRIB / "sparkdraft.service"
PROGRAM = "/opt/sparkdraft/bin/sparkdraft"
# Each of these keeps a process from /dev/nvidia*, or from the code that Triton and CUDA compile while they run.
BREAKS_CUDA = ("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "NoExecPaths")


def directives() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found[name].append(value)
    return found


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "sparkdraft.service"

    def said(text: str) -> str:
        unit.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=PATIENT
        )
        return "".join(line for line in done.stderr.splitlines(keepends=True) if unit.name in line)

    text = UNIT.read_text().replace(PROGRAM, sys.executable)
    assert said(text) == ""
    assert "Unknown key" in said(text.replace("ProtectHome=", "ProtectHomes=")), "it sees mistakes"


def test_the_unit_runs_the_command_as_a_user_of_its_own() -> None:
    strict = configparser.ConfigParser(strict=False, interpolation=None)
    strict.read(UNIT)
    assert strict.sections() == ["Unit", "Service", "Install"]
    unit = directives()
    assert unit["User"] == unit["Group"] == ["sparkdraft"] and unit["Restart"] == ["on-failure"]
    program, *words = shlex.split(unit["ExecStart"][0])
    assert program == PROGRAM and vars(parser().parse_args(words))
    environ = dict(line.split("=", 1) for line in unit["Environment"])
    check_names(environ)
    assert all(value.startswith("/var/cache/sparkdraft") for name, value in environ.items() if "CACHE" in name)
    assert unit["CacheDirectory"] == ["sparkdraft"] and unit["ProtectSystem"] == ["strict"]
    assert any(line.endswith("/etc/sparkdraft/environment") for line in unit["EnvironmentFile"])
    assert not any(name in unit for name in BREAKS_CUDA)
    assert {"NoNewPrivileges", "ProtectHome", "PrivateTmp", "CapabilityBoundingSet"} <= unit.keys()


def test_the_unit_leaves_the_server_time_to_drain() -> None:
    assert float(directives()["TimeoutStopSec"][0]) >= default_of("drain_seconds") + 10
