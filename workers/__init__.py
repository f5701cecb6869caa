"""Who does it, where: sequences, the scheduler, the engine's loop, text, and the command line. Knows no Serve."""
