"""An exact cache with codes beside it, which are never read for output: they measure the error of coding on real
requests.

The model reads only the exact cache, so its text is that of an exact cache to the bit. Every row is coded as well, as
in a TurboQuant cache without uncoded rows, and errors are summed on the device: of a layer's keys (after subtracting
their centre), of its values, and of the attention's result if all keys and values are read from their codes. The last
error depends on the model; the first two hardly do. A hybrid cache reads the first and the recent rows uncoded, so its
errors are smaller than those measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdraft.cache.formats import KVFormat
from sparkdraft.cache.formats.dense import DenseKV, DenseLayer
from sparkdraft.cache.formats.turboquant import CodedLayerKV, TurboQuantKV
from sparkdraft.kernels.ops import AttentionParams, AttentionView, RopeArgs
from sparkdraft.kernels.turboquant.store import planes
from sparkdraft.kernels.turboquant.vectors import Encoded

ERRORS = ("key_error", "value_error", "attention_error")
KEYS, VALUES, ATTENTION = range(len(ERRORS))


class CaptureLayer:
    def __init__(self, exact: DenseLayer, coded: CodedLayerKV, sums: Tensor, rows: Tensor | None) -> None:
        """sums: float64 [errors, 2] of this layer. rows: the row counter; None in all layers but the first."""
        self.exact, self.coded, self._sums, self._rows = exact, coded, sums, rows
        # Kept from the write to the attention of one step: which rows are not padding, bool [rows, 1], and the queries
        # as the coded cache left them, [rows, heads, dim].
        self._is_row = self._queries = torch.empty(0)

    def write(self, qkv: Tensor, rope_args: RopeArgs, slots: Tensor) -> None:
        other = qkv.clone()  # each cache changes its own copy
        self.exact.write(qkv, rope_args, slots)
        self.coded.write(other, rope_args, slots)
        self._queries = other.view(len(other), rope_args.projected_heads, -1)[:, : rope_args.num_heads]
        self._is_row = (slots >= 0).unsqueeze(1)
        if self._rows is not None:
            self._rows += self._is_row.sum()
        self._compare(slots)

    def attend(self, q: Tensor, view: AttentionView, params: AttentionParams) -> Tensor:
        out = self.exact.attend(q, view, params)
        self._add(ATTENTION, self.coded.attend(self._queries, view, params), out)
        return out

    def _compare(self, slots: Tensor) -> None:
        """Compare what the kernels wrote to the two caches. For a row without a slot another row's slot is compared."""
        coded, slot = self.coded.store, slots.clamp(min=0).long()
        block, offset = slot // coded.layout.block_size, slot % coded.layout.block_size
        k, v = (cache[block, :, offset] for cache in (self.exact.k, self.exact.v))  # [rows, kv_heads, dim]
        keys, values = (
            Encoded(tuple(p[block, :, offset] for p in stored.planes), stored.scale[block, :, offset])
            for stored in planes(coded)
        )
        centred = k if coded.centre is None else k.float() - coded.centre
        self._add(KEYS, coded.keys.decode(keys).flatten(1), centred.flatten(1))
        self._add(VALUES, coded.values.decode(values).flatten(1), v.flatten(1))

    def _add(self, error: int, got: Tensor, wanted: Tensor) -> None:  # [rows, n]; 'got' is overwritten
        """Add squared errors. Padding rows, which may hold anything, count as zero, so the host need not select
        rows."""
        squares = [
            torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).square().where(self._is_row, 0)
            for x in (got.float().sub_(wanted), wanted)
        ]
        self._sums[error].add_(torch.cat(squares, dim=1).sum(0, dtype=torch.float64))


class CaptureKV(KVFormat):
    def __init__(self, exact: DenseKV, coded: TurboQuantKV, numbers: Sequence[int], device: torch.device) -> None:
        """numbers: which layers of the model these are."""
        self.exact = exact
        self.bytes_per_token = exact.bytes_per_token + coded.bytes_per_token
        self.meter: CodingErrors = CodingErrors(numbers, device)
        self.layers: list[CaptureLayer] = []
        for i, (dense, codes) in enumerate(zip(exact.layers, coded.layers, strict=True)):
            assert isinstance(dense, DenseLayer), "a layer that borrows its keys has no codes of its own"
            self.layers.append(CaptureLayer(dense, codes, self.meter.sums[i], None if i else self.meter.rows))


class CodingErrors:
    """Sums over all rows, at fixed addresses, because recorded steps add to them.

    They are float64: in float32 the sum of a day's rows would be so large that adding another row changes nothing.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self.numbers = tuple(numbers)
        # Squares of the error and of the exact numbers: [layers, errors, 2]
        self.sums = torch.zeros((len(self.numbers), len(ERRORS), 2), dtype=torch.float64, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)

    def errors(self) -> dict[str, Any]:
        """Relative errors of the codes over all rows since `forget`. Waits for the device.

        Each of ERRORS overall, which is the root of the layers' mean square, and per layer: 'layers' has a record for
        each coded layer, and 'layer' in it is the layer's number in the model.
        """
        wrong, there = self.sums.cpu().unbind(-1)  # [layers, errors] each
        relative = (wrong / there.where(there > 0, 1)).sqrt()
        overall = relative.square().mean(0).sqrt()
        layers = [
            {"layer": number, **dict(zip(ERRORS, row, strict=True))}
            for number, row in zip(self.numbers, relative.tolist(), strict=True)
        ]
        return {"rows": int(self.rows), **dict(zip(ERRORS, overall.tolist(), strict=True)), "layers": layers}

    @torch.inference_mode()
    def forget(self) -> None:
        self.sums.zero_()
        self.rows.zero_()
