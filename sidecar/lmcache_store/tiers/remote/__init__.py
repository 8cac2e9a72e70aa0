"""The remote tier: checksummed objects in Redis or Valkey.

``tier`` implements the contract of lower tiers. ``objects`` names, writes and reads rows, in the formats of
``value_formats``. ``topology`` and ``cluster`` choose the server of an object, ``server`` is one server
with its connections, ``resp`` and ``stream`` are one connection. ``address`` parses the URL, and ``usage``
reads INFO.
"""
