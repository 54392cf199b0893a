"""What follows the logits: argmax with its gap, and decode steps that the device prepares by itself."""
