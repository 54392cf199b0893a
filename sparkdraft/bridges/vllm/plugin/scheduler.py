"""A scheduler for vLLM with our choice of draft depth:

    vllm serve ... --scheduler-cls sparkdraft.bridges.vllm.plugin.scheduler.DepthScheduler

vLLM drafts a fixed number of tokens. With this scheduler each request verifies as many as pay, by measured times and
acceptance. Texts do not change, because the target samples every token. Two things are worse than in our own engine:
vLLM's drafter also runs in steps whose drafts are not verified, and the depth is chosen one step earlier, because vLLM
drafts at the end of a step. On a GPU, num_speculative_tokens_per_batch_size must name the depths that have CUDA graphs;
the scheduler chooses among those.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from sparkdraft.bridges.vllm.plugin import logger
from sparkdraft.bridges.vllm.plugin.depth_steps import DepthSteps

SINCE = "0.24"  # the first version whose depth may change between steps


class DepthScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "num_spec_tokens_to_schedule" not in SchedulerOutput.__dataclass_fields__:
            raise RuntimeError(f"DepthScheduler needs vLLM {SINCE} or newer: leave --scheduler-cls out")
        self._depths: DepthSteps | None = None
        self._accepted: dict[str, tuple[int, int]] = {}
        if not self.num_spec_tokens:
            logger.warning("sparkdraft: nothing is drafted, so DepthScheduler has nothing to choose")
            return
        table = list(getattr(self, "dynamic_sd_lookup", None) or ())
        self._depths = DepthSteps(self.num_spec_tokens, table)
        if not table:  # else new requests are padded to the full depth
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self._depths is None:
            return super()._update_after_schedule(scheduler_output)
        self._depths.finished(scheduler_output.finished_req_ids)
        chosen = self._depths.choose(self._decoding(scheduler_output))
        scheduler_output.num_spec_tokens_to_schedule = max(chosen.values(), default=0)
        super()._update_after_schedule(scheduler_output)
        for name, depth in chosen.items():
            request = self.requests[name]
            request.spec_token_ids = request.spec_token_ids[:depth]

    def _decoding(self, scheduler_output: Any) -> dict[str, int]:
        """Returns the length of each request that will have read its whole prompt after this step."""
        found = {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            if request.num_computed_tokens + count >= request.num_tokens + request.num_output_placeholders:
                found[name] = request.num_tokens
        return found

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        drafted = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        self._accepted[request_id] = (drafted, min(num_accepted_tokens, drafted))
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._depths is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._accepted = {}
        tokens, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        context = max((self.requests[name].num_tokens for name in tokens if name in self.requests), default=0)
        is_pure = all(count == 1 + len(drafts.get(name, ())) for name, count in tokens.items())
        result = super().update_from_output(scheduler_output, model_runner_output)
        for name, count in tokens.items():
            if name in self._accepted:
                self._depths.verified(name, *self._accepted[name])
            elif count == 1:
                self._depths.verified(name, 0, 0)
        self._depths.ended(time.perf_counter(), [*map(len, drafts.values())], len(tokens), context, is_pure)
        if not self.has_unfinished_requests():
            self._depths.idle()
        return result
