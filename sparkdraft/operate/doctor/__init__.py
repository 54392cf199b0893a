"""`sparkdraft doctor`: what is wrong with this machine, and what the engine really runs on it.

`read_...` functions read something and `judge_...` functions judge it from data alone, so that a test can plant every
fault. examine.py calls them in order.
"""
