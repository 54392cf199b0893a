"""Keys and values as they are computed."""

from __future__ import annotations

from sparkdraft.cache.formats.dense import DenseFormat


class Exact(DenseFormat):
    name = title = notation = in_windows = "exact"
    help = "exact"
    share = 1.0


FORMAT = Exact()
