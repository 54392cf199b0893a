"""`sparkdraft bench check-speed`: compares ratios of speeds with those of expected_ratios.json."""
