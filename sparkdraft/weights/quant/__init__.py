"""Quantised weights: stored.py has the forms that all formats are read into, base.py the base of a format, formats.py
the table of formats, and stated.py the statements of a checkpoint's config."""
