"""A tiny model learns to use a calculator, on a CPU."""
