"""Recurrent layers: the gated delta rule for few rows and for prompts, and the operators around it."""
