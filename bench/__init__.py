r"""Measuring: a load generator for any OpenAI-compatible server, the router alone, and servers side by side.

===============  ==========================================================================================
command          what it does
===============  ==========================================================================================
``load``         sends traffic to a running server, open-loop, closed-loop or a named workload, and reports
``compare``      starts several servers in turn, runs the same workloads on each, prints them side by side
``router``       measures the router alone: the real router process, scripted workers that compute nothing
``footprint``    a worker's peak memory and time to readiness, beside their bounds
``roofline``     a step of the model on this CPU beside what the machine can do, and beside transformers
``handover``     what the hand-over adds to the second token of an answer, phase by phase
``grammar``      what holding answers to a grammar costs between two tokens, in turn with free answers
``speculation``  what guessing tokens gains where answers copy and costs where they do not, side by side
``sharing``      KV held for several answers to one prompt, and for beams, beside as many requests alone
``gpu-check``    all that only a GPU can prove, in one call of ten minutes; ``--dry-run`` on the CPU
``kernels``      compiles the Triton kernels without a GPU and judges their machine code; no speed
===============  ==========================================================================================

Beside llama.cpp's server, fp32 on both sides, 3 alternating rounds (about 25 minutes on 2 quiet cores; 5, 32,
32, 8 and 8 requests a round, W4l cut after 60 s; the file is made once)::

    pip install -e '.[peers]'
    python -m pagerelay.bench.peers.f32_gguf
    python -m pagerelay.bench compare --agree --rounds 3 --workload W1,W2,W3,W4b,W4l \
        --spec "split=pagerelay up --threads 1 --port {port} --workers-endpoint tcp://127.0.0.1:0" \
        --spec "colocated=pagerelay up --colocated 1 --threads 2 --port {port} \
                --workers-endpoint tcp://127.0.0.1:0" \
        --spec "llama.cpp=python -m pagerelay.bench.peers.llamacpp --threads 2 --port {port}"

Run as ``python -m pagerelay.bench <command> --help``. Only ``roofline`` needs torch, and nothing is sent off
this host unless ``--allow-remote`` is given.
"""
