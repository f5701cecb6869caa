"""What might be true: guesses, and how they grow into trees. Nothing here decides a token."""
