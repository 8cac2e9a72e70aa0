"""Injection of the cache into users' own pods, such as those of existing Deployments.

``profile`` lists the additions, ``pods`` adds them to one pod or says why it can't, and ``workloads`` does
so for objects in files. The chart's ``injection.yaml`` is the same in CEL.
"""
