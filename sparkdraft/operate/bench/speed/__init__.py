"""`sparkdraft bench check-speed`: ratios of speeds, each measured in one run, compared with a file of expected ratios.

lines.py names the lines, expected_ratios.json has the expected ratio of each, ratios.py measures two things in turn,
verdict.py compares, and check.py goes through the lines. cpu.py, processes.py and cuda.py do the measuring.
"""
