"""Adds vLLM's statistics under our metrics' names to its `/metrics`.

Two metrics are new: drafts by position, without which acceptance by position is wrong where depths differ, and the
states of the patches. With several API processes (`--api-server-count`) the numbers are those of the one that answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import StatLoggerBase

from sparkdraft.bridges.vllm.plugin import states
from sparkdraft.bridges.vllm.plugin.patches import STATES
from sparkdraft.server.metrics import Counter, Histogram, Metrics


class PluginMetrics(Metrics):
    """Our server's metrics, of which vLLM fills a part, and two of the plugin's own."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts_by_position = Counter(
            "spec_decode_num_draft_tokens_per_pos_total", "drafted tokens by position in the draft", "position"
        )
        self.patches = Counter("vllm_patches", "patches of the plugin in the API process, by state", "state", "gauge")

    def filled(self) -> Iterator[Counter | Histogram]:
        """Yields the metrics that vLLM's statistics fill."""
        yield from (self.prompt_tokens, self.cached_tokens, self.generation_tokens, self.success, self.preemptions)
        yield from (self.first_token, self.per_token, self.latency, self.prompt_size, self.output_size)
        yield from (self.drafts, self.draft_tokens, self.accepted_tokens, self.per_position, self.drafts_by_position)
        yield from (self.running, self.waiting, self.kv_usage, self.patches)

    def steps(self, stats: Any) -> None:
        """Adds a step. stats: vLLM's SchedulerStats."""
        self.running.set(stats.num_running_reqs)
        self.waiting.set(stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0))
        self.kv_usage.set(stats.kv_cache_usage)
        drafting = stats.spec_decoding_stats
        if drafting is None:
            return
        self.drafts.add(drafting.num_drafts)
        self.draft_tokens.add(drafting.num_draft_tokens)
        self.accepted_tokens.add(drafting.num_accepted_tokens)
        for metric, name in (
            (self.per_position, "num_accepted_tokens_per_pos"),
            (self.drafts_by_position, "num_draft_tokens_per_pos"),
        ):
            for position, count in enumerate(getattr(drafting, name, ())):
                metric.add(count, str(position))

    def requests(self, stats: Any) -> None:
        """Adds tokens and finished requests. stats: vLLM's IterationStats."""
        self.prompt_tokens.add(stats.num_prompt_tokens)
        self.generation_tokens.add(stats.num_generation_tokens)
        self.preemptions.set(self.preemptions.values[""] + stats.num_preempted_reqs)
        for seconds in stats.time_to_first_tokens_iter:
            self.first_token.observe(seconds)
        for ended in stats.finished_requests:
            self.success.add(label=str(ended.finish_reason))
            self.cached_tokens.add(getattr(ended, "num_cached_tokens", 0))
            self.latency.observe(ended.e2e_latency)
            self.prompt_size.observe(ended.num_prompt_tokens)
            self.output_size.observe(ended.num_generation_tokens)
            if ended.num_generation_tokens > 1:
                self.per_token.observe(ended.mean_time_per_output_token)


class _Shown(Collector):
    """Hands our metrics to prometheus_client."""

    def __init__(self, metrics: PluginMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        found = list(states().values())
        for state in STATES:
            self.metrics.patches.set(found.count(state), state)
        for metric in self.metrics.filled():
            yield family(metric)


def family(metric: Counter | Histogram) -> Metric:
    if isinstance(metric, Histogram):
        shown, below = HistogramMetricFamily(metric.name, metric.text), 0
        buckets = []
        for bound, count in zip([*map(str, metric.bounds), "+Inf"], metric.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        shown.add_metric([], buckets=buckets, sum_value=metric.sum)
        return shown
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    found = kind(metric.name, metric.text, labels=[metric.label] if metric.label else None)
    for label, value in metric.values.items():
        found.add_metric([label] if metric.label else [], value)
    return found


_shown: _Shown | None = None


class SparkdraftStatLogger(StatLoggerBase):
    """The entry point of the group vllm.stat_logger_plugins. All engines of a process share one set of metrics."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        global _shown
        if _shown is None:
            _shown = _Shown(PluginMetrics())
            REGISTRY.register(_shown)
        self.metrics = _shown.metrics

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **rest: Any
    ) -> None:
        if scheduler_stats is not None:
            self.metrics.steps(scheduler_stats)
        if iteration_stats is not None:
            self.metrics.requests(iteration_stats)

    def log_engine_initialized(self) -> None:
        pass
