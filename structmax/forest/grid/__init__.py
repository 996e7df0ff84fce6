"""Dense kernels for paths through a grid by ↘, ↓ and →: the recursion of dynamic time warping.

The forest engine answers for the same structure (``structmax.structures.alignment`` draws it);
these kernels are kept because they are several times faster, and are tested against it.
"""
