"""Toys that let engine tests run in milliseconds: a tokenizer of bytes, and a runner whose 'model' is a hash.

FakeRunner keeps, for every slot of the cache, the id written there. Each step it reads a request's whole past back
through its block table and insists that it is the request's own: any mix-up of blocks, prefixes or lengths fails here.
"""

from __future__ import annotations

import zlib

import torch

from sparkdraft.core import Batch, Request
from sparkdraft.engine.engine import Engine
from sparkdraft.engine.sampler import Sampler
from sparkdraft.plan.memory import MemoryPlan
from sparkdraft.plan.resolve import Plan

VOCAB = 257
EOS = 256


class ByteTokenizer:
    vocab_size = VOCAB
    eos_ids = frozenset({EOS})
    bos_id = None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i != EOS).decode(errors="replace")

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        return b"" if token == EOS else bytes([token])

    first_bytes = token_bytes

    def is_special(self, token: int) -> bool:
        return token == EOS


class FakeRunner:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cache = [-1] * (plan.num_blocks * plan.block_size)
        self.rows_run: list[int] = []  # rows of each step
        self.steps: list[list[tuple[str, int]]] = []  # (request, rows) of each step

    def run(self, batch: Batch) -> torch.Tensor:
        rows = []
        assert 0 < batch.num_rows <= self.plan.max_rows
        assert len({id(w.request) for w in batch.work}) == len(batch.work) <= self.plan.max_seqs
        self.rows_run.append(batch.num_rows)
        self.steps.append([(w.request.id, w.num_scheduled) for w in batch.work])
        for work in batch.work:  # all writes before any read, as in the real thing
            for p, token in enumerate(work.request.ids(work.start, work.stop), work.start):
                self.cache[self._slot(work.request, p)] = token
        for work in batch.work:
            past = [self.cache[self._slot(work.request, p)] for p in range(work.stop)]
            assert past == work.request.ids(0, work.stop), f"{work.request.id}: the cache holds another text"
            if work.samples:
                rows.append(hash_logits(past))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _slot(self, request: Request, position: int) -> int:
        size = self.plan.block_size
        return request.blocks[position // size] * size + position % size


def hash_logits(ids: list[int]) -> torch.Tensor:
    """Logits that depend on every id before them, and on nothing else."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(ids).encode()))
    return torch.randn(VOCAB, generator=generator)


def fake_plan(
    num_blocks: int = 64, block_size: int = 4, max_seqs: int = 8, max_rows: int = 32, **changes: object
) -> Plan:
    values: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "kernels": "reference",
        "threads": 1,
        "max_model_len": num_blocks * block_size,
        "max_seqs": max_seqs,
        "max_rows": max_rows,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "prefix_cache": True,
        "graphs": False,
        "memory": MemoryPlan(0, 0, 0, 0),
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def fake_engine(**changes: object) -> Engine:
    plan = fake_plan(**changes)  # type: ignore[arg-type]
    tokenizer = ByteTokenizer()
    sampler = Sampler(VOCAB, tokenizer.eos_ids, torch.device("cpu"))
    return Engine(plan, FakeRunner(plan), sampler, tokenizer)  # type: ignore[arg-type]
