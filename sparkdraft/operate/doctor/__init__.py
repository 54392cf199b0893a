"""`sparkdraft doctor`: what is wrong with this machine, and what the engine really runs on it. See examine.py.

Each file reads something (`read_...`) and judges it (`judge_...`, from data alone, so that a test can plant every
fault). Findings are sentences for a person; report.py makes the verdict.
"""
