"""What it comes to: comparisons, benchmarks and evaluations over the real engine. The service uses none of this."""
