"""What follows the logits: edits, filters and draws, and decode steps that the device prepares by itself."""
