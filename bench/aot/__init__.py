"""Compiles the Triton kernels for architectures that need not be here, and judges their machine code.

``variants`` says which, ``cubin`` reads the code, ``__main__`` judges it, in a process of its own.
"""
