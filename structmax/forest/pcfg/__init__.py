"""Dense kernels for weighted grammars in Chomsky normal form: charts by matrix products.

The forest engine answers for the same structure (``structmax.structures.pcfg`` draws it) and is
what these kernels are tested against, but it lists n³/6·N·(N+P)² hyperedges; a matrix product needs
none of them. The charts are plain torch, the same on a CPU and a GPU: ``scaled``, ``products`` and
``low_rank`` in exp space, ``terms`` in log space and for the maximum. A tensor of rules is answered
by the first of ``scaled``, ``products`` and ``terms`` whose range holds its numbers, from fast to
slow, and its Hessian by the last two. ``products_cpu`` is ``products`` compiled, for grammars of
few symbols on the CPU, and ``best_cpu`` the charts of the maximum. ``cpu`` walks finished charts
top-down.
"""
