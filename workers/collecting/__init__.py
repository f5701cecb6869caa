"""Training data: the target is let to write conversations, and its hidden states are kept."""
