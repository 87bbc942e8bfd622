"""Triton kernels, one file per op, installed as ``orthokern.triton_kernels``.

A file has the stem of its op, as every other implementation of it has (``orthokern/reference/<op>.py``,
``csrc/cpu/<op>.cpp``, ``csrc/cuda/<op>.cu``). The folder is installed under ``orthokern`` because Triton itself ships a
top-level package named ``triton_kernels``.

Each file exports ``<op>_fwd`` and ``<op>_bwd`` with the signatures of the reference, and names a kernel
``<op>_fwd_kernel`` (both scans, in both directions: ``scan_kernel`` in ``_scan.py``). Names inside a kernel say what
kind of thing they hold:

=============  ====================================================================  =======================
prefix         holds                                                                 example
=============  ====================================================================  =======================
``i_``         an index: the program's, or of a loop over tiles                      ``i_b``, ``i_t``
``o_``         offsets, a vector of indices inside a tile                            ``o_n``
``p_``         a pointer, or a block of pointers                                     ``p_h``
``b_``         a tile of values, held in registers                                   ``b_h``, ``b_delta``
``m_``         a mask                                                                ``m_n``
``BLOCK_``     the extent of a tile along a letter, ``tl.constexpr``                 ``BLOCK_R``, ``BLOCK_N``
=============  ====================================================================  =======================

The letters are the project's: B batch, T time, N hidden, K rank of U and V, D input.

Every launch passes ``enable_fp_fusion=True``, so that a product and a sum are one FMA. Triton's default becomes False
with 3.10.

This module imports without Triton and without a GPU. A kernel file imports ``triton``. Only the dispatcher loads it,
after it has checked that Triton is installed.
"""
