"""`sparkdraft tune`: measures settings and tiles over the user's model and prompts, and keeps those that are faster."""
