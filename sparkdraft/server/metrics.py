"""Counters, gauges and histograms in Prometheus' text format, without its library.

Every series has the prefix `sparkdraft_`. Those that vLLM has too are written a second time as `vllm:...`, with vLLM's
label model_name, from the same numbers, so that dashboards and tools made for vLLM read this server unchanged. What
only the engine knows (use of the cache, waiting requests) is copied from its status on request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from math import isnan
from typing import Any, TypeVar

from sparkdraft.operate.canary.findings import FAILED, PASSED, SKIPPED
from sparkdraft.server.watchdog import Alarm

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
PREFIX, OF_VLLM = "sparkdraft_", "vllm:"
IN_VLLM = frozenset(  # the names that vLLM has too
    {
        "prompt_tokens_total",
        "generation_tokens_total",
        "prompt_tokens_cached_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
    }
)
EARLIER = {"inter_token_latency_seconds": "time_per_output_token_seconds"}  # names that vLLM had before
M = TypeVar("M", bound="Counter | Histogram")


class Counter:
    """A counter or a gauge, with one number per label value. name: without a prefix."""

    def __init__(self, name: str, text: str, label: str = "", kind: str = "counter") -> None:
        self.name, self.text, self.label, self.kind = name, text, label, kind
        self.values: dict[str, float] = {} if label else {"": 0.0}

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0.0) + amount

    def set(self, value: float, label: str = "") -> None:
        """For gauges, and for counters that are copied from the engine's status or the watchdog."""
        self.values[label] = value

    def lines(self, prefix: str = PREFIX, label: str = "") -> Iterator[str]:
        """label: one that every series gets, such as 'model_name="x"'."""
        name = prefix + self.name
        yield from _head(name, self.text, self.kind)
        for value, number in self.values.items():
            own = f'{self.label}="{_escaped(value)}"' if self.label else ""
            yield f"{name}{_labels(label, own)} {_number(number)}"


class Histogram:
    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, prefix: str = PREFIX, label: str = "") -> Iterator[str]:
        name, below = prefix + self.name, 0
        yield from _head(name, self.text, "histogram")
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            le = f'le="{bound}"'
            yield f"{name}_bucket{_labels(label, le)} {below}"
        yield f"{name}_sum{_labels(label)} {_number(self.sum)}"
        yield f"{name}_count{_labels(label)} {below}"


def renamed(metric: M, name: str, text: str = "") -> M:
    """The same numbers under another name."""
    twin = copy(metric)
    twin.name, twin.text = name, text or metric.text
    return twin


class Metrics:
    def __init__(self) -> None:
        self.model_name = ""  # the value of vLLM's label
        self.http = Counter("http_requests_total", "answers by status", "status")
        self.prompt_tokens = Counter("prompt_tokens_total", "prompt tokens of requests that began to answer")
        self.generation_tokens = Counter("generation_tokens_total", "tokens that were written")
        self.cached_tokens = Counter("prompt_tokens_cached_total", "prompt tokens that the prefix cache supplied")
        self.looked_up = renamed(
            self.prompt_tokens, "prefix_cache_queries_total", "prompt tokens that were looked up in the prefix cache"
        )
        self.found = renamed(
            self.cached_tokens, "prefix_cache_hits_total", "prompt tokens that were found in the prefix cache"
        )
        self.success = Counter("request_success_total", "sequences that ended, by reason", "finished_reason")
        self.aborted = Counter("request_aborted_total", "requests whose client went away")
        self.failed = Counter("request_failed_total", "requests that ended with an error after they were admitted")
        self.first_token = Histogram("time_to_first_token_seconds", "from the request to its first token", SECONDS)
        self.per_token = Histogram(
            "request_time_per_output_token_seconds", "time per token after the first, per request", TOKEN_SECONDS
        )
        self.between = Histogram(
            "inter_token_latency_seconds", "between two outputs of a request that writes one text", TOKEN_SECONDS
        )
        self.latency = Histogram("e2e_request_latency_seconds", "from the request to its end", SECONDS)
        self.prompt_size = Histogram("request_prompt_tokens", "prompt tokens per request", TOKENS)
        self.output_size = Histogram("request_generation_tokens", "tokens written per request", TOKENS)
        self.drafts = Counter("spec_decode_num_drafts_total", "steps that drafted")
        self.draft_tokens = Counter("spec_decode_num_draft_tokens_total", "tokens that were drafted")
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens_total", "drafted tokens that were accepted")
        self.per_position = Counter(
            "spec_decode_num_accepted_tokens_per_pos_total", "accepted tokens by position in the draft", "position"
        )
        self.running = Counter("num_requests_running", "sequences that run", kind="gauge")
        self.waiting = Counter("num_requests_waiting", "sequences that wait", kind="gauge")
        self.kv_usage = Counter("kv_cache_usage_perc", "share of the caches that requests hold, 0 to 1", kind="gauge")
        self.kv_rows = Counter("kv_cache_captured_rows", "rows in which errors of coding were measured", kind="gauge")
        self.key_error, self.value_error, self.attention_error = (
            Counter(f"kv_cache_{what}_error", f"relative error by codes: {text}", "layer", "gauge")
            for what, text in (("key", "keys"), ("value", "values"), ("attention", "attention's result, all coded"))
        )
        self.preemptions = Counter("num_preemptions_total", "times a running sequence gave its KV blocks back")
        probed = "1 if a probe of the canary passed, 0 if it failed, at the last start"
        self.probe_passed = Counter("canary_probe_passed", probed, "probe", "gauge")
        self.part_off = Counter("part_disabled", "1 for a part that the canary switched off", "part", "gauge")
        self.watched = Counter("watchdog_value", "the last value read, by cause", "cause", "gauge")
        self.alarm = Counter("watchdog_active", "1 while a cause lasts and is reacted to", "cause", "gauge")
        self.alarms = Counter("watchdog_alarms_total", "times that a cause has begun", "cause")
        self.ready = Counter("engine_ready", "1 when requests are taken", kind="gauge")
        self.silence = Counter(
            "engine_silence_seconds", "seconds since the engine process last gave a sign of life", kind="gauge"
        )
        self.restarts = Counter("engine_restarts", "times the engine process was started again", kind="gauge")

    def speculation(self, stats: Mapping[str, Any]) -> None:
        """Count one sequence's `speculative_decoding` record."""
        self.drafts.add(stats["num_spec_steps"])
        self.draft_tokens.add(stats["num_draft_tokens"])
        self.accepted_tokens.add(stats["num_accepted_draft_tokens"])
        for position, count in enumerate(stats.get("per_position_accepted") or []):
            self.per_position.add(count, str(position))

    def coding(self, errors: Mapping[str, Any]) -> None:
        """Copy the engine's `kv_errors`, which exist in the mode capture_only."""
        self.kv_rows.set(errors["rows"])
        for found in errors["layers"]:
            layer = str(found["layer"])
            self.key_error.set(found["key_error"], layer)
            self.value_error.set(found["value_error"], layer)
            self.attention_error.set(found["attention_error"], layer)

    def canary(self, findings: Iterable[Mapping[str, Any]]) -> None:
        self.probe_passed.values.clear()
        self.part_off.values.clear()
        for finding in findings:
            if finding["status"] != SKIPPED:
                self.probe_passed.set(float(finding["status"] == PASSED), finding["probe"])
            if finding["status"] == FAILED and finding["part"]:
                self.part_off.set(1, finding["part"])

    def watch(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            name = alarm.cause.name
            self.alarm.set(float(alarm.active), name)
            self.alarms.set(alarm.times, name)
            if not isnan(alarm.value):
                self.watched.set(alarm.value, name)

    def render(self) -> str:
        every = [metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)]
        lines = [line for metric in every for line in metric.lines()]
        label = f'model_name="{_escaped(self.model_name)}"'
        for metric in every:
            if metric.name in IN_VLLM:
                lines += metric.lines(OF_VLLM, label)
            if earlier := EARLIER.get(metric.name):
                lines += renamed(metric, earlier).lines(OF_VLLM, label)
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(*labels: str) -> str:
    given = ",".join(filter(None, labels))
    return f"{{{given}}}" if given else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
