"""Does the layout compute what a single device computes? The case to run, and its judgement."""
