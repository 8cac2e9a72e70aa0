"""The page of ``kubectl lmcache report``. Only ``prometheus`` does I/O: it reads the past.

``html`` escapes every text, ``charts`` draws what happened over time, ``sections``, ``saving`` and ``sizing``
are the parts of the page, and ``page`` puts them together.
"""
