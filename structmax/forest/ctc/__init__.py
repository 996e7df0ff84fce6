"""Dense kernels for connectionist temporal classification, under Shannon's entropy.

The forest engine answers for the same structure (``structmax.structures.ctc`` draws it) and for
everything else; these kernels are kept because they are several times faster, and are tested
against it.
"""
