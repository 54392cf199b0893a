"""Runs traffic (traffic.py) on an engine in this process: what streaming.py measures, without a server and a client.

A piece is an output with ids. A client sees only those whose ids complete a character. A sampling parameter that is
not given is off here; a server takes it from the model's generation_config.json.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from sparkdraft.core import SamplingParams
from sparkdraft.engine.engine import Engine
from sparkdraft.operate.bench.traffic import Answered, Planned, Record


def run(
    engine: Engine, planned: Sequence[Planned], streams: int, sampling: dict[str, Any], answered: Answered
) -> tuple[list[Record], float]:
    """Adds the requests as they arrive, at most 'streams' at once; returns their records, and the seconds in all. A
    request begins when it arrives and there is a place for it, even if that is in the middle of a step."""
    coming, running, records = deque(planned), dict[str, Record](), list[Record]()
    begin = free = time.perf_counter()  # free: when a place became free that had been waited for
    while coming or running:
        while coming and len(running) < streams and coming[0].at <= time.perf_counter() - begin:
            each = coming.popleft()
            params = SamplingParams(max_tokens=each.output_len, ignore_eos=True, **sampling)
            record = Record(max(begin + each.at, free))
            records.append(record)
            running[engine.add(each.prompt, params)] = record
        if not running:
            time.sleep(max(0.0, begin + coming[0].at - time.perf_counter()))
            continue
        outputs = engine.step()
        now, full = time.perf_counter(), len(running) == streams
        for output in outputs:
            record = running[output.request_id]
            record.tokens += len(output.ids)
            if output.ids:
                record.pieces.append(now)
            if output.finish:
                record.ended = now
                del running[output.request_id]
                free = now if full else free
                answered()
    return records, time.perf_counter() - begin
