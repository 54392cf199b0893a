"""`sparkdraft bench check-speed`: ratios of speeds, each measured in one run, held to a file of expected ratios.

lines.py names the lines, expected_ratios.json says what each should be, ratios.py measures two things in turn,
verdict.py compares, check.py goes through the lines; cpu.py, processes.py and cuda.py do the measuring.
"""
