"""Explains where prompt tokens came from, and why the others were computed: words and advice. Pure.

The sidecar counts tokens by cause (``causes`` of ``/stats``); commands print them.
"""
