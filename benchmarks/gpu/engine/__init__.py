"""Parts of the step ``vllm`` of ``make gpu-check``: a real vLLM beside real sidecars."""
