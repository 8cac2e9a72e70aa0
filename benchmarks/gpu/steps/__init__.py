"""The steps of ``make gpu-check``, one module each with a function ``run(results, scale)``."""
