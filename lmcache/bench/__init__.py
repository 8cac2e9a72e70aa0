"""A load generator for OpenAI-compatible engines, which shows what the cache saves.

Two command lines share it: ``lmcache-sidecar bench`` and ``kubectl lmcache bench``. It needs only the
standard library. ``workloads`` generates prompts, ``client`` sends one request, ``runner`` sends all of them
twice, ``results`` adds up and compares, and ``command`` has the options.

``sessions.jsonl`` has lengths and prefix hashes of 16 sessions of a chat service, without text. They are
from the trace that was published with "Mooncake: Trading More Storage for Less Computation" (FAST '25,
https://github.com/kvcache-ai/Mooncake, Apache License 2.0, Copyright the Mooncake authors). Sessions are an
excerpt, and blocks have new numbers.
"""
