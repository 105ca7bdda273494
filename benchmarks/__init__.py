"""One script for each question, run from a checkout as `python -m benchmarks.NAME`."""
