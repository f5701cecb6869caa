"""What is learnt, one method a file. The loop knows none of them: see `base`."""
