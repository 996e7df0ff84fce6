"""Combinatorial algorithms that are no dynamic programs over a forest."""
