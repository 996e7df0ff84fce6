"""Dense kernels for the linear chain: the forest of a tag sequence is a regular grid.

The forest engine answers for the same structure (``structmax.structures.linear_chain`` draws it);
these kernels are kept because they are several times faster, and are tested against it.
"""
