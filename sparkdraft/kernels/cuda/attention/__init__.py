"""Attention over the paged cache: exact keys and values (paged.py), and TurboQuant codes (turboquant/)."""
