"""What is true: the target model, its paged KV cache, tree attention, and the one rule of acceptance."""
