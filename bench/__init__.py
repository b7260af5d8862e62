"""Measuring: a load generator for any OpenAI-compatible server, the router alone, and servers side by side.

============  ==========================================================================================
command       what it does
============  ==========================================================================================
``load``      sends traffic to a running server, open-loop, closed-loop or a named workload, and reports
``compare``   starts several servers in turn, runs the same workloads on each, prints them side by side
``router``    measures the router alone: the real router process, scripted workers that compute nothing
``kernels``   compiles the Triton kernels for two GPU architectures and judges their machine code
============  ==========================================================================================

Run as ``python -m pagerelay.bench <command> --help``. Nothing here needs torch (``kernels``
starts a process that does), and nothing is sent off this host unless ``--allow-remote`` is given.
"""
