"""An emulated GPU for an unmodified vLLM: its CUDA platform, GPU worker and V2 model runner on CPU tensors.

``emulation.start()`` must run before the process imports vLLM. See docs/reference/simulated-driver.md for
what the emulation is and is not.
"""
