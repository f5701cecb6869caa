"""Draft heads for one's own models: data that the target writes itself, training, evaluation, export."""
