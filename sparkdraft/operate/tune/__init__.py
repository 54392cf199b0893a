"""`sparkdraft tune`: measures settings on the user's machine, model and prompts, and writes a profile of the best.

profile.py is the file and how it is picked up, knobs.py what may be set to what, search.py the search and the verdict
(numbers alone), engines.py what is measured, tiles.py the search for kernels' tiles, and model_tiles.py that search for
a model's own matrices.
"""
